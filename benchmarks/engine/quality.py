"""Rows of quality: how far a compute's next-token distributions are from the fp32 reference's.

Mean Kullback–Leibler divergence in nats over the positions of real text, and how often the best
token is the same. Peers of the same file with 8-bit activations are the fair neighbours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics  # English prose in every Python

import numpy
import torch

from benchmarks.beside import compared
from benchmarks.engine.bench import SUFFIXES, Bench
from benchmarks.peers.driven import DrivenEngine, PeerLost
from engine.execute.weights import Checkpoint
from node_agent.bundle import load_bundle
from node_agent.errors import NodeError
from policies.contract.bundle import decode_bundle

NAME = "quality"
POSITIONS = (1024, 256)  # full, quick
PIECE = 256  # tokens of one text
CHUNK = 64  # rows of logits at a time


@dataclass(frozen=True, slots=True)
class Nearness:
    divergence: float  # nats a position
    agreement: float  # share of positions with the same best token


def add_rows(bench: Bench, model: Path, checkpoint: Checkpoint) -> None:
    if not bench.wants(NAME):
        return
    if bench.reference is None:
        bench.leave_out(NAME, "it needs the fp32 reference: --peers transformers")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            pieces = _pieces(model, checkpoint, Path(folder), POSITIONS[bench.quick])
        except NodeError as error:
            bench.leave_out(NAME, f"no text without a tokenizer: {error}".split("\n", 1)[0])
            return
        judge = Judge(bench.reference, pieces, Path(folder))
        ours = {compute: judge.nearness(engine) for compute, engine in bench.ours.items()}
        theirs: dict[str, Nearness] = {}
        for name, peer in list(bench.peers.items()):
            if peer is bench.reference or name.startswith("vLLM"):
                continue  # vLLM tells log probabilities of some tokens only
            try:
                theirs[name] = judge.nearness(peer)
            except PeerLost as lost:
                bench.lose(name, lost)
    for compute, near in ours.items():
        beside = {name: other.divergence for name, other in theirs.items()}
        agreements = {f"ours {other}": found.agreement for other, found in ours.items()}
        agreements |= {name: found.agreement for name, found in theirs.items()}
        told = ", ".join(f"{name} {share:.1%}" for name, share in agreements.items())
        others = [
            f"ours {other} {found.divergence:.2g} nats"
            for other, found in ours.items()
            if other != compute
        ]
        bench.add_row(
            compared(
                f"{NAME}{SUFFIXES[compute]}",
                near.divergence,
                beside,
                "nats of KL",
                more_is_better=False,
                detail=f"{judge.positions} positions; same best token: "
                + "; ".join([told, *others]),
            )
        )


def _pieces(model: Path, checkpoint: Checkpoint, cache: Path, positions: int) -> list[list[int]]:
    """Texts from different places. Raises NodeError as prose does."""
    ids = prose(model, checkpoint, cache, characters=positions * 12)
    step = len(ids) // (positions // PIECE)
    return [ids[start : start + PIECE] for start in range(0, step * (positions // PIECE), step)]


def prose(model: Path, checkpoint: Checkpoint, cache: Path, *, characters: int) -> list[int]:
    """Token ids of Python's documentation, of its topics so many characters.

    Raises NodeError where the model comes without a tokenizer."""
    from tokenizers import Tokenizer

    _, encoded = load_bundle(
        model,
        cache,
        source_digest=checkpoint.weights_digest,
        context_tokens=None,
        page_size=64,
        labels=(),
    )
    tokenizer = Tokenizer.from_str(decode_bundle(encoded).tokenizer_json.decode())
    text = "\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = tokenizer.encode(text[:characters], add_special_tokens=False).ids
    return ids


class Judge:
    """Asks everyone for logits after the same tokens, through files."""

    def __init__(self, reference: DrivenEngine, pieces: list[list[int]], folder: Path) -> None:
        self._pieces = pieces
        self._folder = folder
        self._references = [folder / f"reference-{index}.npy" for index in range(len(pieces))]
        for piece, path in zip(pieces, self._references, strict=True):
            reference.logits(piece, path)
        self.positions = sum(len(piece) - 1 for piece in pieces)

    def nearness(self, engine: DrivenEngine) -> Nearness:
        divergence, same = 0.0, 0
        path = self._folder / "logits.npy"
        for piece, reference in zip(self._pieces, self._references, strict=True):
            engine.logits(piece, path)
            for found, wanted in _chunks(path, reference, len(piece) - 1):
                likely = torch.log_softmax(wanted, -1)
                gap = likely - torch.log_softmax(found, -1)
                divergence += float((likely.exp() * gap).sum())
                same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
        return Nearness(divergence / self.positions, same / self.positions)


def _chunks(path: Path, reference: Path, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    found, wanted = (numpy.load(file, mmap_mode="r") for file in (path, reference))
    for start in range(0, rows, CHUNK):
        stop = min(start + CHUNK, rows)
        yield (
            torch.from_numpy(found[start:stop].astype(numpy.float64)),
            torch.from_numpy(wanted[start:stop].astype(numpy.float64)),
        )
