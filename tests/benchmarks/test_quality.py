"""Quality is told from whole distributions: known divergences, and our own logits at each token."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest

from benchmarks.engine.quality import Judge

PIECES = [[1, 2, 3], [4, 5, 6, 7]]


class Written:
    """An engine whose logits are the same after every token."""

    def __init__(self, *logits: float) -> None:
        self._row = logits

    def logits(self, tokens: list[int], path: Path) -> None:
        numpy.save(path, numpy.array([self._row] * len(tokens), dtype=numpy.float32))


def test_divergence_and_agreement_are_those_of_the_distributions(tmp_path) -> None:
    even, uneven = Written(0.0, 0.0), Written(math.log(3), 0.0)
    judge = Judge(even, PIECES, tmp_path)  # type: ignore[arg-type]
    assert judge.positions == 5
    same = judge.nearness(Written(2.0, 2.0))  # type: ignore[arg-type]
    assert (same.divergence, same.agreement) == (pytest.approx(0, abs=1e-9), 1.0)
    other = judge.nearness(uneven)  # type: ignore[arg-type]
    assert other.divergence == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), rel=1e-6)
    turned = Judge(uneven, PIECES, tmp_path).nearness(Written(0.0, 1.0))  # type: ignore[arg-type]
    assert turned.agreement == 0.0


def test_our_logits_are_those_that_a_client_is_told_from(tiny_llama, tmp_path) -> None:
    import torch

    from benchmarks.engine.our_driver import Ours, load
    from benchmarks.peer import transformers_llama
    from engine.execute.weights import open_checkpoint

    tokens = [5, 17, 99, 3, 42, 120, 7] * 12
    Ours(load(tiny_llama, "exact", 1)).logits(tokens, str(tmp_path / "ours.npy"))
    reference = transformers_llama(open_checkpoint(tiny_llama), dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, :-1]
    ours = numpy.load(tmp_path / "ours.npy")
    assert ours.shape == (len(tokens) - 1, 160)
    assert numpy.abs(ours - expected.numpy()).max() < 0.05 * float(expected.std())
