"""The CPU kernels' norms, gates and best logits, against torch."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from engine.execute.kernels.cpu import library
from engine.execute.kernels.cpu.library import Args, Best, Gate, Library, Norm, Step
from tests.engine.execute.planes import values_of

SHAPES = [(1, 576), (3, 15), (7, 123), (41, 2048), (200, 64)]  # rows, width
EPS = 1e-5


@dataclass
class Quants:
    """Rows of integers as quantize_row leaves them, and what they mean."""

    high: Tensor
    low: Tensor
    scales: Tensor
    sums: Tensor
    isa: str

    @staticmethod
    def empty(kernels: Library, rows: int, width: int) -> "Quants":
        width = -(-width // 32) * 32
        return Quants(
            torch.empty(rows, width, dtype=torch.int8),
            torch.empty(rows, width, dtype=torch.int8),
            torch.empty(rows, width // 32),
            torch.empty(rows, width // 16),
            kernels.isa,
        )

    def struct(self) -> library.Quants:
        arrays = (self.high, self.low, self.scales, self.sums)
        return library.Quants(*(array.data_ptr() for array in arrays), self.high.shape[1])

    def integers(self) -> Tensor:
        return values_of(self.high, self.low, self.isa)

    def values(self) -> Tensor:
        return self.integers().double() * self.scales.double().repeat_interleave(32, dim=1)


def run(kernels: Library, args: Args, *, rows: int, last: Tensor | None = None) -> None:
    step = Step(rows=rows)
    if last is not None:
        step.num_last, step.last = len(last), last.data_ptr()
    kernels.run(library.program([args]), step)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return functional.rms_norm(x.double(), (x.shape[-1],), gain.double(), EPS)


@pytest.mark.parametrize("has_post", [False, True])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_norm_adds_and_norms(kernels: Library, rows: int, width: int, has_post: bool) -> None:
    torch.manual_seed(rows)
    x, added = 3 * torch.randn(rows, width), torch.randn(rows, width)
    post, gain = torch.randn(2, width)
    total = x.double() + (normed(added, post) if has_post else added.double())
    out = torch.empty(rows, width)
    norm = Norm(
        x=x.data_ptr(),
        added=added.data_ptr(),
        post=post.data_ptr() if has_post else None,
        gain=gain.data_ptr(),
        out=out.data_ptr(),
        eps=EPS,
        width=width,
    )
    run(kernels, norm, rows=rows)
    assert_close(x.double(), total, rtol=1e-6, atol=1e-6)
    assert_close(out.double(), normed(total, gain), rtol=2e-6, atol=1e-6)


def test_norm_without_gain_only_adds(kernels: Library) -> None:
    x, added = torch.randn(2, 5, 99)
    total = x + added
    run(kernels, Norm(x=x.data_ptr(), added=added.data_ptr(), eps=EPS, width=99), rows=5)
    assert torch.equal(x, total)


def test_norm_of_the_last_rows_leaves_x_as_it_is(kernels: Library) -> None:
    x, gain = torch.randn(9, 40), torch.randn(40)
    before, last, out = x.clone(), torch.tensor([1, 4, 8], dtype=torch.int32), torch.zeros(4, 40)
    norm = Norm(
        x=x.data_ptr(),
        gain=gain.data_ptr(),
        out=out.data_ptr(),
        eps=EPS,
        width=40,
        only_last=1,
    )
    run(kernels, norm, rows=9, last=last)
    assert torch.equal(x, before)
    assert_close(out[:3].double(), normed(x[last.long()], gain), rtol=2e-6, atol=1e-6)
    assert not out[3].any(), "no row beyond the last ones"


@pytest.mark.parametrize("keeps_floats", [False, True])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_quantised_rows_mean_the_floats(
    kernels: Library, rows: int, width: int, keeps_floats: bool
) -> None:
    """Each integer is within half a step of its block's scale, and columns that fill up are 0."""
    torch.manual_seed(rows)
    x, gain = torch.randn(rows, width), torch.randn(width)
    halves = torch.randn(rows, 2 * width)
    # A row's floats are quantised in place: they must end on a whole block.
    fits = width % 32 == 0
    for make in (
        lambda out, quants: Norm(
            x=x.data_ptr(), gain=gain.data_ptr(), out=out, quants=quants, eps=EPS, width=width
        ),
        lambda out, quants: Gate(in_=halves.data_ptr(), out=out, quants=quants, width=width),
    ):
        exact, quants = torch.empty(rows, width), Quants.empty(kernels, rows, width)
        run(kernels, make(exact.data_ptr(), None), rows=rows)
        out, struct = torch.empty(rows, width), ctypes.pointer(quants.struct())
        keeps = keeps_floats and fits
        run(kernels, make(out.data_ptr() if keeps else None, struct), rows=rows)
        if keeps:
            assert torch.equal(out, exact)
        padded = functional.pad(exact.double(), (0, quants.high.shape[1] - width))
        step = quants.scales.double().repeat_interleave(32, dim=1)
        assert ((quants.values() - padded).abs() <= 0.505 * step).all()  # its product is rounded
        sums = quants.integers().view(rows, -1, 2, 16).sum(3)
        sums[:, :, 0] += sums[:, :, 1]
        assert torch.equal(quants.sums, (sums * quants.scales[:, :, None]).flatten(1))


Activation = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    ("is_gelu", "activation", "rtol"),
    [
        (False, functional.silu, 3e-6),
        (True, lambda x: functional.gelu(x, approximate="tanh"), 5e-6),
    ],
)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_gate(
    kernels: Library, rows: int, width: int, is_gelu: bool, activation: Activation, rtol: float
) -> None:
    torch.manual_seed(rows)
    halves = 6 * torch.randn(rows, 2 * width)
    halves[0, :4] = torch.tensor([0.0, -0.0, 60.0, -60.0])
    out = torch.empty(rows, width)
    gate = Gate(in_=halves.data_ptr(), out=out.data_ptr(), width=width, is_gelu=is_gelu)
    run(kernels, gate, rows=rows)
    first, second = halves.double().split(width, dim=1)
    assert_close(out.double(), activation(first) * second, rtol=rtol, atol=1e-7)


def test_the_exponential_is_as_exact_as_its_scaled_argument(kernels: Library) -> None:
    """Seen through x / (1 + e^-x) where e^-x is all that counts: at x far below 0."""
    x = torch.linspace(-86.9, -20, 100_001)
    halves, out = torch.stack([x, 1 / x]).view(1, -1), torch.empty(1, len(x))
    run(kernels, Gate(in_=halves.data_ptr(), out=out.data_ptr(), width=len(x)), rows=1)
    # Rounded are log2 e and its product with x, then e^-x, a sum, a quotient, 1 / x, a product.
    exact = 1 / (1 + (-x.double()).exp())
    assert (((out.double() - exact) / exact).abs() < (4 + 0.7 * x.abs()) * 2**-23).all()


def test_gates_of_what_is_not_finite(kernels: Library) -> None:
    nan, inf = float("nan"), float("inf")
    halves, out = torch.tensor([[nan, inf, 1.0, 1e30, -1e30, 1, 1, nan, 1, 1]]), torch.empty(1, 5)
    run(kernels, Gate(in_=halves.data_ptr(), out=out.data_ptr(), width=5), rows=1)
    assert out.isnan().tolist() == [[True, False, True, False, False]]
    assert out[0, 1] == inf
    assert out[0, 3] == torch.tensor(1e30)
    assert abs(out[0, 4]) < 1e-7


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 1000, 49_153])
def test_best(kernels: Library, columns: int) -> None:
    torch.manual_seed(columns)
    logits = torch.randn(5, columns)
    logits[1] = logits[1].round()  # many equal ones
    logits[2] = -float("inf")
    logits[3, columns // 2] = float("inf")
    logits[4, columns - 1] = float("nan")
    ids, values = torch.full((5,), -1, dtype=torch.int32), torch.zeros(5)
    best = Best(logits.data_ptr(), ids.data_ptr(), values.data_ptr(), columns)
    run(kernels, best, rows=9, last=torch.arange(5, dtype=torch.int32))
    assert ids[:4].tolist() == [row.index(max(row)) for row in logits[:4].tolist()]
    assert values[:4].tolist() == logits[:4].max(dim=1).values.tolist()
    assert values[4].isnan()
    assert 0 <= ids[4] < columns


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_have_the_same_bits_in_any_batch(isa: str, threads: int) -> None:
    kernels = library.load(isa=isa, threads=threads)
    assert kernels is not None
    x, gain, halves = torch.randn(300, 576), torch.randn(576), torch.randn(300, 2 * 576)
    whole, alone = torch.empty(2, 300, 576), torch.empty(2, 300, 576)

    def ops(out: Tensor, first: int) -> list[Args]:
        return [
            Norm(
                x=x[first].data_ptr(),
                gain=gain.data_ptr(),
                out=out[0, first].data_ptr(),
                eps=EPS,
                width=576,
            ),
            Gate(in_=halves[first].data_ptr(), out=out[1, first].data_ptr(), width=576),
        ]

    kernels.run(library.program(ops(whole, 0)), Step(rows=300))
    for row in range(300):
        kernels.run(library.program(ops(alone, row)), Step(rows=1))
    kernels.close()
    assert torch.equal(whole, alone)
