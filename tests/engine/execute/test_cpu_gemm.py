"""The CPU kernels' quantised products: exact weights, known rounding, and bits of a row's own."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from engine.config import ConfigError
from engine.execute.kernels.cpu import library
from engine.execute.kernels.cpu.library import ISAS, Embed, Gate, Gemm, Library, Packed, Step
from engine.execute.weights import ggml_blocks
from tests.engine.execute.planes import planes_of, values_of

FORMATS = {form.name: (code, form) for code, form in ggml_blocks.FORMATS.items()}
QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
HALVES = {  # where a block's fp16 numbers are, and how large they may be
    "q4_0": {0: 0.02},
    "q4_1": {0: 0.02, 2: 0.2},
    "q5_0": {0: 0.01},
    "q5_1": {0: 0.01, 2: 0.2},
    "q8_0": {0: 0.002},
    "q4_k": {0: 3e-4, 2: 3e-3},
    "q5_k": {0: 2e-4, 2: 3e-3},
    "q6_k": {208: 1e-4},
}
SHAPES = [(1, 32), (17, 256), (40, 288), (96, 576), (130, 1536)]  # outputs, inputs
LIMIT = {True: 32512, False: 127}  # the largest integer, with both planes and with one


def opened(isa: str, threads: int) -> Library:
    try:
        found = library.load(isa=isa, threads=threads)
    except ConfigError:
        pytest.skip(f"this CPU has no {isa}")
    if found is None:
        pytest.skip(f"no kernels here: {library.why_absent()}")
    return found


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = opened(request.param, 1)
    yield found
    found.close()


def random_blocks(name: str, n: int, k: int) -> Tensor:
    """Bytes of n rows in a GGML format, with scales of both signs."""
    _, form = FORMATS[name]
    data = torch.randint(0, 256, (n * k // form.weights, form.num_bytes), dtype=torch.uint8)
    for at, size in HALVES[name].items():
        numbers = (size * torch.randn(len(data))).half()
        data[:, at : at + 2] = numbers.view(torch.uint8).view(-1, 2)
    return data.view(n, -1)


def room_for(kernels: Library, packed: Packed) -> Tensor:
    """Full of ones: packing must write every byte."""
    size = kernels.functions.kagari_packed_bytes(ctypes.byref(packed))
    data = torch.full((size,), 255, dtype=torch.uint8)
    packed.data = data.data_ptr()
    return data


@dataclass
class Weights:
    """Packed rows beside what they mean."""

    packed: Packed
    exact: Tensor  # fp32 [n, k]
    data: Tensor

    @staticmethod
    def of(
        kernels: Library, name: str, n: int, k: int, *, order: Tensor | None = None
    ) -> "Weights":
        code, form = FORMATS[name]
        rows = random_blocks(name, n, k)
        packed = Packed()
        assert kernels.functions.kagari_ggml_form(code, n, k, ctypes.byref(packed)) == 0
        data = room_for(kernels, packed)
        picked = None if order is None else order.data_ptr()
        kernels.functions.kagari_pack_ggml(code, rows.data_ptr(), n, picked, ctypes.byref(packed))
        exact = ggml_blocks.unpack(form, rows.view(-1)).view(n, k)
        exact = exact if order is None else exact[order.long()]
        return Weights(packed, exact, data)

    def units(self) -> Tensor:
        """Of 4-bit weights, fp64 [n]: behind the runs."""
        return self.data[-4 * self.packed.n :].view(torch.float32)[: len(self.exact)].double()


def is_whole(kernels: Library, both: bool) -> bool:
    """Whether a row of activations has one scale, and products are of whole numbers."""
    return both and kernels.isa == "amx"


def counts_of(high: Tensor, low: Tensor | None) -> Tensor:
    assert low is not None
    sums = torch.stack([plane.view(len(plane), -1, 32).sum(2) for plane in (high, low)], 2)
    return torch.cat((-7 * sums, sums << 16), 2).to(torch.int32).flatten(1)


def largest_of(kernels: Library, x: Tensor, *, both: bool) -> Tensor:
    """[rows, k / 32]: of what shares a scale with a block."""
    largest = x.view(len(x), -1, 32).abs().amax(2)
    return largest.amax(1, keepdim=True).expand_as(largest) if is_whole(kernels, both) else largest


@dataclass
class Quants:
    """Rows of activations as integers, as the kernels take them."""

    high: Tensor  # int8 [rows, k]
    low: Tensor | None
    scales: Tensor  # fp32 [rows, k / 32]
    sums: Tensor  # fp32 [rows, k / 16]: of each 32, and of the last 16 of them
    isa: str
    counts: Tensor | None = None  # int32 [rows, k / 8]: of each 32 the planes', by -7 and by 2¹⁶

    @staticmethod
    def of(kernels: Library, x: Tensor, *, both: bool) -> "Quants":
        """By torch, to the kernels' rule."""
        blocks = x.view(len(x), -1, 32)
        largest = largest_of(kernels, x, both=both)
        factor = torch.where(largest == 0, 0, torch.tensor(float(LIMIT[both])) / largest)
        values = torch.round(blocks * factor[:, :, None]).int().view(len(x), -1)
        high, low = planes_of(values, kernels.isa) if both else (values.to(torch.int8), None)
        scales = largest / LIMIT[both]
        sums = values.view(len(x), -1, 2, 16).sum(3)
        sums[:, :, 0] += sums[:, :, 1]
        return Quants(
            high=high,
            low=low,
            scales=scales,
            sums=(sums * scales[:, :, None]).flatten(1),
            isa=kernels.isa,
            counts=counts_of(high, low) if is_whole(kernels, both) else None,
        )

    @staticmethod
    def empty(kernels: Library, rows: int, k: int, *, both: bool) -> "Quants":
        whole = is_whole(kernels, both)
        return Quants(
            high=torch.full((rows, k), 99, dtype=torch.int8),
            low=torch.full((rows, k), 99, dtype=torch.int8) if both else None,
            scales=torch.full((rows, k // 32), 99.0),
            sums=torch.full((rows, k // 16), 99.0),
            isa=kernels.isa,
            counts=torch.full((rows, k // 8), 99, dtype=torch.int32) if whole else None,
        )

    def struct(self) -> library.Quants:
        low = None if self.low is None else self.low.data_ptr()
        return library.Quants(
            high=self.high.data_ptr(),
            low=low,
            scales=self.scales.data_ptr(),
            sums=self.sums.data_ptr(),
            width=self.high.shape[1],
            counts=None if self.counts is None else self.counts.data_ptr(),
        )

    def values(self) -> Tensor:
        integers = self.high if self.low is None else values_of(self.high, self.low, self.isa)
        return integers.double() * self.scales.double().repeat_interleave(32, 1)

    def rows(self, start: int, stop: int) -> "Quants":
        some = slice(start, stop)
        low = None if self.low is None else self.low[some]
        counts = None if self.counts is None else self.counts[some]
        return Quants(self.high[some], low, self.scales[some], self.sums[some], self.isa, counts)


def product(
    kernels: Library, weights: Weights, quants: Quants, *, bias: Tensor | None = None
) -> Tensor:
    """fp32 [rows, n]."""
    rows, n = len(quants.high), len(weights.exact)
    out = torch.full((rows, n + 3), -7.0)
    struct = quants.struct()
    gemm = Gemm(
        ctypes.pointer(weights.packed),
        ctypes.pointer(struct),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        n,
        n + 3,
        0,
    )
    kernels.run(library.program([gemm]), Step(rows=rows))
    assert (out[:, n:] == -7).all(), "only the columns asked for are written"
    return out[:, :n].contiguous()


def embedded(kernels: Library, weights: Weights, ids: Tensor, *, scale: float = 1.0) -> Tensor:
    out = torch.empty(len(ids), weights.packed.k)
    embed = Embed(ctypes.pointer(weights.packed), out.data_ptr(), scale)
    kernels.run(library.program([embed]), Step(rows=len(ids), ids=ids.data_ptr()))
    return out


def quantised(kernels: Library, x: Tensor, *, both: bool) -> Quants:
    """By the kernels: silu(64) × x / 64 = x, exactly, is quantised where the gate writes it."""
    rows, k = x.shape
    halves = torch.cat((torch.full_like(x, 64), x / 64), 1)
    quants = Quants.empty(kernels, rows, k, both=both)
    struct = quants.struct()
    gate = Gate(halves.data_ptr(), None, ctypes.pointer(struct), k, 0)
    kernels.run(library.program([gate]), Step(rows=rows))
    return quants


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (17, 256), (40, 768)])
def test_weights_stay_exactly_the_files(kernels: Library, name: str, n: int, k: int) -> None:
    weights = Weights.of(kernels, name, n, k)
    ids = torch.randint(0, n, (33,), dtype=torch.int32)
    assert torch.equal(embedded(kernels, weights, ids), weights.exact[ids.long()])
    doubled = embedded(kernels, weights, ids, scale=2.0)
    assert torch.equal(doubled, 2 * weights.exact[ids.long()])


def test_rows_are_packed_in_the_order_given(kernels: Library) -> None:
    order = torch.randperm(40).int()
    weights = Weights.of(kernels, "q4_1", 40, 96, order=order)
    everything = torch.arange(40, dtype=torch.int32)
    assert torch.equal(embedded(kernels, weights, everything), weights.exact)


def test_unknown_types_and_broken_blocks_are_refused(kernels: Library) -> None:
    form, packed = kernels.functions.kagari_ggml_form, ctypes.byref(Packed())
    assert form(12, 16, 256, packed) == 0  # q4_K
    assert form(10, 16, 256, packed) == -1  # q2_K
    assert form(12, 16, 128, packed) == -1  # half a block


@pytest.mark.parametrize(("bits", "block", "wide", "has_min"), [
    (4, 32, 0, 1), (4, 16, 1, 0), (4, 32, 1, 1), (8, 32, 0, 0), (8, 16, 0, 1), (8, 32, 1, 1),
])  # fmt: skip
def test_any_integers_are_packed_and_multiplied(
    kernels: Library, bits: int, block: int, wide: int, has_min: int
) -> None:
    n, k = 24, 160
    low, high = (0, 16) if bits == 4 else (-128, 128)
    quants = torch.randint(low, high, (n, k)).to(torch.uint8 if bits == 4 else torch.int8)
    scales = torch.randn(n, k // block)
    minima = torch.randn(n, k // block)
    if not wide:
        scales, minima = scales.half().float(), minima.half().float()
    packed = Packed(None, 32, k, bits, block, wide, has_min)
    data = room_for(kernels, packed)
    kernels.functions.kagari_pack(
        quants.data_ptr(),
        scales.data_ptr(),
        minima.data_ptr() if has_min else None,
        n,
        ctypes.byref(packed),
    )
    exact = quants * scales.repeat_interleave(block, 1)
    if has_min:
        exact = exact + minima.repeat_interleave(block, 1)
    weights = Weights(packed, exact, data)
    everything = torch.arange(n, dtype=torch.int32)
    assert torch.equal(embedded(kernels, weights, everything), exact)
    check_product(kernels, weights, torch.randn(7, k), both=True)


def check_product(kernels: Library, weights: Weights, x: Tensor, *, both: bool) -> None:
    quants = Quants.of(kernels, x, both=both)
    out = product(kernels, weights, quants).double()
    exact = weights.exact.double()
    summed = quants.values() @ exact.T  # of what the kernel was given: only its sums round
    sizes = quants.values().abs() @ exact.abs().T
    slack = 4e-6 * sizes + 1e-12
    if is_whole(kernels, both) and weights.packed.bits == 4:  # half a unit in scales and in middles
        slack += quants.values().abs().sum(1)[:, None] * 4.501 * weights.units()
    assert ((out - summed).abs() <= slack).all()
    # Of the activations themselves: half a step of the largest for each input.
    steps = largest_of(kernels, x, both=both).double().repeat_interleave(32, 1) / LIMIT[both]
    bound = 0.5001 * steps @ exact.abs().T + slack
    assert ((out - x.double() @ exact.T).abs() <= bound).all()


@pytest.mark.parametrize("both", [True, False], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 33, 100])
def test_products_are_within_their_rounding(
    kernels: Library, name: str, rows: int, both: bool
) -> None:
    for n, k in SHAPES:
        if k % FORMATS[name][1].weights == 0:
            weights = Weights.of(kernels, name, n, k)
            check_product(kernels, weights, 3 * torch.randn(rows, k), both=both)


@pytest.mark.parametrize("both", [True, False], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize(
    ("name", "k"), [("q4_1", 768), ("q4_1", 1568), ("q4_k", 512), ("q8_0", 768), ("q6_k", 768)]
)
def test_a_rows_bits_are_its_own(kernels: Library, name: str, k: int, both: bool) -> None:
    weights = Weights.of(kernels, name, 40, k)
    quants = Quants.of(kernels, torch.randn(100, k), both=both)
    together = product(kernels, weights, quants)
    alone = torch.cat([product(kernels, weights, quants.rows(i, i + 1)) for i in range(100)])
    assert torch.equal(together, alone)
    for count in (2, 3, 4, 6, 7, 8, 15, 65):
        part = product(kernels, weights, quants.rows(0, count))
        assert torch.equal(part, together[:count])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("quant", [0, 15])
def test_the_largest_sums_fit(kernels: Library, quant: int, sign: int) -> None:
    """Everything as large as it can be, and of one sign."""
    k = 1536
    quants, scales = torch.full((16, k), quant, dtype=torch.uint8), torch.ones(16, k // 32)
    minima = scales * (quant - 15.0)
    packed = Packed(None, 16, k, 4, 32, 0, 1)
    data = room_for(kernels, packed)
    kernels.functions.kagari_pack(
        quants.data_ptr(), scales.data_ptr(), minima.data_ptr(), 16, ctypes.byref(packed)
    )
    exact = quants.float() + minima[:, :1]
    weights = Weights(packed, exact, data)
    for low in (127, 128):  # 32,512 = 127 × 256; 32,384 = 127 × 256 - 128
        x = torch.full((17, k), sign * (32640.0 - low))
        x[:, 0] = 32512
        check_product(kernels, weights, x, both=True)
        together = product(kernels, weights, Quants.of(kernels, x, both=True))
        assert torch.equal(
            product(kernels, weights, Quants.of(kernels, x[:1], both=True)), together[:1]
        )


@pytest.mark.parametrize("isa", ISAS)
def test_threads_change_no_bit(isa: str) -> None:
    one = opened(isa, 1)
    weights = Weights.of(one, "q4_1", 200, 576)
    quants = Quants.of(one, torch.randn(70, 576), both=True)
    alone = product(one, weights, quants)
    two = opened(isa, 2)
    assert torch.equal(product(two, weights, quants), alone)
    two.close()


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q4_k", "q6_k"])
def test_the_vector_instruction_sets_agree_in_every_bit(name: str) -> None:
    outs = []
    torch.manual_seed(3)
    x = torch.randn(9, 512)
    for isa in ("avx2", "avx512"):
        torch.manual_seed(4)
        kernels = opened(isa, 1)
        outs.append(
            product(kernels, Weights.of(kernels, name, 48, 512), Quants.of(kernels, x, both=True))
        )
        kernels.close()
    assert torch.equal(*outs)


@pytest.mark.parametrize("both", [True, False], ids=["16 bits", "8 bits"])
def test_activations_are_rounded_to_nearest_even(kernels: Library, both: bool) -> None:
    torch.manual_seed(5)
    x = torch.randn(9, 96) * torch.logspace(-20, 20, 9)[:, None]
    x[3] = 0
    x[4, 32:64] = 0
    x[5, :32] = torch.arange(32) - 16 + 0.5  # ties, with the largest that makes the factor 1
    x[5, 0] = LIMIT[both]
    quants, expected = quantised(kernels, x, both=both), Quants.of(kernels, x, both=both)
    assert torch.equal(quants.high, expected.high)
    if both:
        assert quants.low is not None
        assert expected.low is not None
        assert torch.equal(quants.low, expected.low)
    assert torch.equal(quants.scales, expected.scales)
    assert torch.equal(quants.sums, expected.sums)
    if is_whole(kernels, both):
        assert quants.counts is not None
        assert expected.counts is not None
        assert torch.equal(quants.counts, expected.counts)


def test_blocks_too_small_to_matter_become_zero(kernels: Library) -> None:
    x = torch.full((1, 64), 1e-38)
    x[0, 40] = 1.0
    quants = quantised(kernels, x, both=True)
    assert (quants.scales[0, 0] == 0) != is_whole(kernels, True)
    assert not quants.values()[0, :32].any()
    assert_close(quants.values()[0, 40].item(), 1.0)


@pytest.mark.parametrize("both", [True, False], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_becomes_nan_and_only_that_row(
    kernels: Library, odd: float, both: bool
) -> None:
    x = torch.randn(6, 96)
    x[2, 70] = odd
    for name in ("q4_1", "q8_0"):
        weights = Weights.of(kernels, name, 40, 96)
        out = product(kernels, weights, quantised(kernels, x, both=both))
        insane = out.isnan()
        assert insane[2].all()
        assert not insane[[0, 1, 3, 4, 5]].any()


def test_sums_begin_with_the_bias_which_zero_rows_give_back(kernels: Library) -> None:
    weights = Weights.of(kernels, "q4_1", 40, 96)
    x = torch.randn(3, 96)
    x[1] = 0
    quants, bias = Quants.of(kernels, x, both=True), torch.randn(40)
    with_bias = product(kernels, weights, quants, bias=bias)
    assert_close(with_bias, product(kernels, weights, quants) + bias, atol=1e-4, rtol=1e-5)
    assert torch.equal(with_bias[1], bias)


def test_only_last_rows_and_none_at_all(kernels: Library) -> None:
    weights = Weights.of(kernels, "q8_0", 32, 64)
    quants = Quants.of(kernels, torch.randn(5, 64), both=True)
    struct, out = quants.struct(), torch.full((5, 32), -7.0)
    gemm = Gemm(
        ctypes.pointer(weights.packed), ctypes.pointer(struct), None, out.data_ptr(), 32, 32, 1
    )
    kernels.run(library.program([gemm]), Step(rows=5, num_last=0))
    assert (out == -7).all()
    kernels.run(library.program([gemm]), Step(rows=5, num_last=2))
    assert torch.equal(out[:2], product(kernels, weights, quants)[:2])
    assert (out[2:] == -7).all()
