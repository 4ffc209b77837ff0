"""A plan's rows as arrays: what the kernels are told of positions, pages and last tokens."""

from array import array
from ctypes import c_float, c_int8, c_int32

import pytest
import torch
from torch.testing import assert_close

from engine.execute.arena import Arena
from engine.execute.host_memory import zeros
from engine.execute.models.program import Activations
from engine.execute.native_step import NativeStep
from engine.schedule.plan import Row
from engine.store.page_codec import PageLayout
from policies.contract.wire import Sampling
from tests.engine.execute.planes import values_of

GREEDY = Sampling(max_tokens=9, temperature=0.0)


def row(start: int, count: int, pages: list[int], *, samples: bool = True) -> Row:
    ids = array("I", range(100, 100 + count))
    return Row(1, start, ids, (pages,), ([1] * len(pages),), GREEDY, 0, samples)


def ints(address: int, count: int) -> list[int]:
    return list((c_int32 * count).from_address(address))


def test_rows_lie_in_the_plans_order() -> None:
    rows = [row(33, 1, [7, 2, 9]), row(14, 20, [4, 5, 6], samples=False), row(0, 2, [8])]
    found = NativeStep(rows, page_size=16, most_last=9, context_tokens=34)
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
    rows = [row(0, 1, [at]) for at in range(5)]
    found = NativeStep(rows, page_size=16, most_last=3, context_tokens=9)
    assert found.last.tolist() == [0, 1, 2]
    found.look_at([3, 4])
    assert ints(found.step.last, found.step.num_last) == [3, 4]


def test_a_position_without_a_turn_is_refused() -> None:
    with pytest.raises(AssertionError, match="position 34, allowed up to 33"):
        NativeStep([row(33, 2, [0, 1, 2])], page_size=16, most_last=1, context_tokens=34)


def test_rows_are_rounded_as_the_kernels_do_for_an_op_of_torchs() -> None:
    """Sixteen bits a value, in two signed bytes or a word, and a scale for each 32; or eight."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    x[1] = 0
    x[2, 40] = float("nan")
    for has_low, isa, limit in ((True, "avx512", 32512), (True, "avx2", 32512), (False, "", 127)):
        made = Activations(7, 64, has_low=has_low, has_words=isa == "avx2")
        made.floats[:5] = x
        made.quantize(5)
        quants = made.quants
        assert quants is not None
        assert (quants.low is not None) == has_low
        planes = (c_int8 * (7 * 64)).from_address(quants.high)
        values = torch.tensor(planes).view(7, 64)[:5].int()
        if has_low:
            low = torch.tensor((c_int8 * (7 * 64)).from_address(quants.low)).view(7, 64)[:5]
            values = values_of(values.to(torch.int8), low.to(torch.int8), isa)
        scales = torch.tensor((c_float * 14).from_address(quants.scales)).view(7, 2)[:5]
        sums = torch.tensor((c_float * 28).from_address(quants.sums)).view(7, 4)[:5]
        halves = values.view(5, 2, 2, 16).sum(-1)  # told: of a block, and of its second half
        halves[..., 0] += halves[..., 1]
        wanted = halves * scales[..., None]
        assert_close(sums.view(5, 2, 2), wanted, atol=0, rtol=0, equal_nan=True)
        assert scales[2].isnan().tolist() == [False, True]
        found, scales = values.view(5, 2, 32) * scales[..., None], scales.nan_to_num()
        blocks = x.view(5, 2, 32)
        near = (found - blocks).abs() <= 0.5001 * scales[..., None]
        assert near[[0, 1, 3, 4]].all()
        assert near[2, 0].all()
        assert int(values.abs().max()) == limit


def test_rows_share_a_scale_and_planes_are_counted_where_tiles_multiply() -> None:
    """Fewer rows than `few` have one plane, and a scale for each 32."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    made = Activations(7, 64, has_low=True, has_counts=True, few=4)
    made.floats[:5] = x
    made.quantize(5)
    quants = made.quants
    assert quants is not None
    high, low = (
        torch.tensor((c_int8 * (2 * 7 * 64)).from_address(quants.high)).view(2, 7, 2, 32).int()
    )
    scales = torch.tensor((c_float * 14).from_address(quants.scales)).view(7, 2, 1)[:5]
    assert_close(scales.view(5, 2), x.abs().amax(1, keepdim=True).expand(5, 2) / 32512)
    found = ((high * 256 + low)[:5] * scales).view(5, 64)
    assert ((found - x).abs() <= 0.5001 * scales[:, 0]).all()
    counts = torch.tensor((c_int32 * (7 * 2 * 4)).from_address(quants.counts)).view(7, 2, 4)[:5]
    sums = torch.stack((high.sum(-1), low.sum(-1)), -1)[:5]
    assert torch.equal(counts, torch.cat((-7 * sums, sums << 16), -1).to(torch.int32))
    made.quantize(3)
    scales = torch.tensor((c_float * 14).from_address(quants.scales)).view(7, 2)[:3]
    assert_close(scales, x[:3].view(3, 2, 32).abs().amax(2) / 127)


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
