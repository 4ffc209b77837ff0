"""A plan's rows as arrays: what the kernels are told of positions, pages and last tokens."""

from array import array
from ctypes import c_int32

import torch

from engine.execute.arena import Arena
from engine.execute.host_memory import zeros
from engine.execute.native_step import NativeStep
from engine.schedule.plan import Row
from engine.store.page_codec import PageLayout
from policies.contract.wire import Sampling

GREEDY = Sampling(max_tokens=9, temperature=0.0)


def row(start: int, count: int, pages: list[int], *, samples: bool = True) -> Row:
    ids = array("I", range(100, 100 + count))
    return Row(1, start, ids, (pages,), ([1] * len(pages),), GREEDY, 0, samples)


def ints(address: int, count: int) -> list[int]:
    return list((c_int32 * count).from_address(address))


def test_rows_lie_in_the_plans_order() -> None:
    rows = [row(33, 1, [7, 2, 9]), row(14, 20, [4, 5, 6], samples=False), row(0, 2, [8])]
    found = NativeStep(rows, page_size=16, most_last=9)
    step = found.step
    assert (step.rows, step.num_spans, step.num_last) == (23, 3, 2)
    assert ints(step.ids, 23) == [100, *range(100, 120), 100, 101]
    assert ints(step.positions, 23) == [33, *range(14, 34), 0, 1]
    assert ints(step.slots_page, 23) == [9, *[4] * 2, *[5] * 16, *[6] * 2, 8, 8]
    assert ints(step.spans, 12) == [0, 1, 33, 0, 1, 20, 14, 3, 21, 2, 0, 6]
    assert ints(step.pages, 7) == [7, 2, 9, 4, 5, 6, 8]
    assert ints(step.last, 2) == [0, 22]
    assert found.first_tokens == [0, 1, 21]


def test_the_head_looks_at_so_many_rows_and_then_at_others() -> None:
    found = NativeStep([row(0, 1, [at]) for at in range(5)], page_size=16, most_last=3)
    assert found.last.tolist() == [0, 1, 2]
    found.look_at([3, 4])
    assert ints(found.step.last, found.step.num_last) == [3, 4]


def test_a_page_of_another_generation_is_foreign() -> None:
    arena = Arena(PageLayout("bf16", 1, 1, 16, 16), 8, device=torch.device("cpu"))
    arena.assign([(3, 10**12), (5, 4)])
    assert not arena.foreign([3, 5], [10**12, 4])
    assert arena.foreign([3, 5], [10**12, 5])
    arena.tags[5] = 5
    assert not arena.foreign([3, 5], [10**12, 5])


def test_untouched_memory_is_zero_and_writable() -> None:
    made = zeros(3, 700, 1000, dtype=torch.float32)
    assert made.shape == (3, 700, 1000)
    assert not made.any()
    made[1] = 2
    assert made.sum() == 2 * 700 * 1000
