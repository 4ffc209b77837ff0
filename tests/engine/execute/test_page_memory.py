"""Pages as tiers see them: in place, or staged as for a GPU, where copies end late."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.execute.arena import Arena
from engine.execute.page_memory import ArenaMemory, GpuCopies, StagedMemory, page_memory
from engine.store.fault_tier import Fault, FaultTier
from engine.store.host import HostTier
from engine.store.page_codec import PageLayout
from policies.contract.wire import Sampling, pack_ids
from tests.engine import tiered_bench
from tests.engine.execute.conftest import RunnerMaker

LAYOUT = PageLayout("bf16", num_layers=2, num_kv_heads=1, page_size=16, head_dim=8)


class LateCopies(GpuCopies):
    """Copies nothing before finish; buffers are full of what nobody wrote."""

    def __init__(self) -> None:
        self.queued: list[tuple[Tensor, Tensor]] = []
        self.buffers = 0

    def buffer(self, num_bytes: int) -> Tensor:
        self.buffers += 1
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def queue(self, target: Tensor, source: Tensor) -> None:
        self.queued.append((target, source))

    def finish(self) -> None:
        for target, source in self.queued:
            target.copy_(source)
        self.queued.clear()


def full_arena() -> Arena:
    arena = Arena(LAYOUT, 8, device=torch.device("cpu"))
    for page in range(8):
        arena.load(page, bytes([page]) * LAYOUT.page_bytes)
    return arena


def staged(arena: Arena) -> StagedMemory:
    return StagedMemory(arena, LateCopies())


@pytest.mark.parametrize("make", [page_memory, staged])
def test_pages_go_out_and_come_in(make: Callable[[Arena], ArenaMemory | StagedMemory]) -> None:
    memory = make(arena := full_arena())
    out = memory.outgoing([2, 5])
    assert [bytes(view) for view in out] == [bytes([at]) * LAYOUT.page_bytes for at in (2, 5)]
    into = memory.incoming([0, 1])
    for view, source in zip(into, out, strict=True):
        view[:] = source
    memory.arrive([1], into[1:])
    assert bytes(arena.bytes_of(1)) == bytes([5]) * LAYOUT.page_bytes
    memory.free([*out, *into])
    memory.assign([(1, 9)])
    assert (memory.generation(1), memory.generation(2)) == (9, 0)


def test_what_did_not_arrive_leaves_a_staged_page_as_it_was() -> None:
    memory = staged(arena := full_arena())
    (view,) = memory.incoming([3])
    view[:] = bytes(LAYOUT.page_bytes)
    memory.free([view])
    assert bytes(arena.bytes_of(3)) == bytes([3]) * LAYOUT.page_bytes


def test_a_buffer_is_lent_to_one_until_it_is_freed_and_then_again() -> None:
    copies = LateCopies()
    memory = StagedMemory(full_arena(), copies)
    first = memory.outgoing([1, 2])
    second = memory.outgoing([3, 4])
    assert [view[0] for view in (*first, *second)] == [1, 2, 3, 4]
    memory.free(first)
    third = memory.outgoing([6, 7])
    assert copies.buffers == 4
    assert [view[0] for view in (*second, *third)] == [3, 4, 6, 7]


def test_warm_equals_cold_over_staged_pages_whatever_the_tier_does(
    tiny_gguf: Callable[[str], Path], make_runner: RunnerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_runner(tiny_gguf("llama"), precision="native", num_pages=20)
    monkeypatch.setattr(tiered_bench, "page_memory", staged)
    faults = [None] * 6 + [Fault.CORRUPT, Fault.DROP, Fault.DELAY, None] * 40
    tier = FaultTier(HostTier(model.arena.layout, 40), faults)
    bench = tiered_bench.TieredBench(tier, context_tokens=200, model=model)
    for lane in range(1, 9):
        prompt = array("I", [(7 * at * at + lane % 2) % 150 for at in range(70)])
        bench.submit(1, (lane,), prompt=pack_ids(prompt), sampling=Sampling(8, temperature=0.0))
        bench.settle()
        assert bench.tokens[1, lane] == bench.tokens[1, 2 - lane % 2]
        bench.evict_all()
        model.arena.pages.fill_(0)
    assert bench.scheduler.tiers.report({})[0].hit_pages > 0
    assert not bench.memory._lent
    bench.engine.close()
