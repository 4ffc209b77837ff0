"""Pages of one kind are equal to the last bit; whatever may change a bit makes another kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execute.kernels.cpu import build, library
from engine.store.page_kind import page_kind
from tests.engine.execute.conftest import RunnerMaker, TinyFolder

FACTS: dict[str, Any] = {
    "identity": "m@1",
    "compute": "exact",
    "tokenizer_digest": "t",
    "weights_digest": "w",
    "layout_id": "l",
    "arithmetic": "a",
}


@pytest.mark.parametrize("changed", FACTS)
def test_every_fact_makes_a_kind_of_its_own(changed: str) -> None:
    other = "fast" if changed == "compute" else "other"
    assert page_kind(**FACTS) == page_kind(**FACTS)
    assert page_kind(**FACTS) != page_kind(**FACTS | {changed: other})


def test_each_instruction_set_has_an_arithmetic_of_its_own(
    isa: str, tiny_gguf: Callable[[str], Path], make_runner: RunnerMaker, monkeypatch: Any
) -> None:
    path = tiny_gguf("llama")
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    runner, again = (make_runner(path, precision="native", threads=at) for at in (1, 2))
    assert runner.arithmetic == again.arithmetic, "threads change no bit"
    assert runner.arithmetic.startswith(f"int16-{isa}-")
    fast = "int16" if isa == "scalar" else "int8"  # which has no quicker product of bytes
    assert make_runner(path, precision="fast").arithmetic.startswith(f"{fast}-{isa}-")


def test_torch_tells_its_version_and_its_machine(
    tiny_folder: TinyFolder, make_runner: RunnerMaker, monkeypatch: Any
) -> None:
    path = tiny_folder()
    names = [make_runner(path, precision=way).arithmetic for way in ("fp32", "bf16", "native")]
    assert len(set(names)) == 3
    assert all(f"torch-{torch.__version__}-" in name for name in names), "plain weights are torch's"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"l2_cache_size": 1})
    assert make_runner(path, precision="fp32").arithmetic != names[0]


def test_a_build_is_known_by_its_sources_or_by_its_bytes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KAGARI_CACHE", str(tmp_path))
    kept, given = tmp_path / "kernels" / "1-2.so", tmp_path / "1-2.so"
    assert build.build_id(kept) == "1-2"
    ids = []
    for content in (b"a", b"b"):
        given.write_bytes(content)
        ids.append(build.build_id(given))
    assert len({*ids, "1-2"}) == 3
