"""Triton's page kernels against the reference, interpreted, and compiled for the GPUs we name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.execute.kernels import reference, triton
from engine.execute.kernels.registry import kernels_for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 64), (5, 3, 20), (7, 2, 33)])
def test_write_pages_equals_reference(
    tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    pages, layers, page_size = 4, 3, 8
    torch.manual_seed(0)
    arena = torch.randn(pages, layers, 2, heads, page_size, dim).to(dtype)
    kv = torch.randn(tokens, 2, heads, dim).to(dtype)
    slots = torch.randperm(pages * page_size)[:tokens]
    halves = torch.arange(2 * heads)
    blocks = (slots // page_size)[:, None] * (layers * 2 * heads) + halves
    places = (blocks * page_size + (slots % page_size)[:, None]).view(tokens, 2, heads)
    expected, found = arena.clone(), arena.clone()
    layer = 2
    offset = layer * 2 * heads * page_size
    reference.write_pages(kv, expected, places, offset=offset)
    triton.write_pages(kv, found, places, offset=offset)
    # Compared as bits: a copy has no tolerance.
    assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))
    page, at = int(slots[0]) // page_size, int(slots[0]) % page_size
    assert torch.equal(found[page, layer, 1, heads - 1, at], kv[0, 1, heads - 1])
    assert torch.equal(found[:, :layer], arena[:, :layer])


@pytest.mark.parametrize("pairs", [0, 1, 255, 600])
def test_verify_tags_equals_reference(pairs: int) -> None:
    generator = torch.Generator().manual_seed(pairs)
    tags = torch.randint(1, 1 << 40, (50,), generator=generator)
    pages = torch.randint(0, 50, (pairs,), generator=generator)
    rows = torch.randint(0, 9, (pairs,), generator=generator)
    generations = tags[pages].clone()
    if pairs:
        generations[pairs // 2] += 1 << 33  # equal in the lower half
    expected = reference.verify_tags(tags, pages, generations, rows, num_rows=9)
    found = triton.verify_tags(tags, pages, generations, rows, num_rows=9)
    assert torch.equal(expected, found)
    assert expected.tolist() == [pairs > 0 and row == int(rows[pairs // 2]) for row in range(9)]


def test_devices_choose_their_backend() -> None:
    assert kernels_for(torch.device("cpu")).backend == "reference"
    assert kernels_for(torch.device("cuda")).backend == "triton"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.execute.kernels import triton as kernels

cases = [
    (kernels._write_pages, {"kv": "*i16", "arena": "*i16", "places": "*i64", "offset": "i64",
                            "dim": "i32", "BLOCK": "constexpr"}, {"BLOCK": 64}),
    (kernels._write_pages, {"kv": "*i32", "arena": "*i32", "places": "*i64", "offset": "i64",
                            "dim": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128}),
    (kernels._verify_tags, {"tags": "*i64", "pages": "*i64", "generations": "*i64",
                            "rows": "*i64", "wrong": "*i32", "pairs": "i32",
                            "BLOCK": "constexpr"}, {"BLOCK": 256}),
]
for capability in (80, 90, 100):
    for kernel, signature, constants in cases:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            assert compiled.asm[stage], stage
        target = [line for line in compiled.asm["ptx"].splitlines() if line.startswith(".target")]
        print(capability, kernel.fn.__name__, *target)
"""


def test_kernels_compile_for_every_named_architecture() -> None:
    """In a process of its own: an interpreted kernel cannot be compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for architecture in ("sm_80", "sm_90", "sm_100"):
        assert done.stdout.count(architecture) == 3, done.stdout
