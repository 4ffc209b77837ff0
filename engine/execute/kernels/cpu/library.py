"""The door to the compiled kernels: their structs, their functions, and which tier serves."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.execute.kernels.cpu import build

TIERS = ("scalar", "avx2", "avx512")
TIER_VARIABLE = "KAGARI_CPU_TIER"


class Kind(IntEnum):
    """Of an Op, by the type of its args; the order is abi.h's."""

    EMBED = 0
    NORM = 1
    GEMM = 2
    ROPE = 3
    ATTEND = 4
    GATE = 5
    BEST = 6


# Mirrors of the structs in abi.h, where their fields are explained. Arrays are addresses
# (c_void_p): whoever fills a struct keeps what it points to.


class Packed(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("bits", c_int32),
        ("block", c_int32),
        ("wide", c_int32),
        ("has_min", c_int32),
    ]


class Quants(Structure):
    _fields_ = [
        ("high", c_void_p),
        ("low", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("width", c_int32),
    ]


class Span(Structure):
    _fields_ = [
        ("first_row", c_int32),
        ("num_rows", c_int32),
        ("start", c_int32),
        ("first_page", c_int32),
    ]


class Step(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("num_spans", c_int32),
        ("num_last", c_int32),
        ("padding", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots_page", c_void_p),
        ("spans", c_void_p),
        ("pages", c_void_p),
        ("last", c_void_p),
    ]


class Arena(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("page_stride", c_int64),
        ("layer_offset", c_int64),
        ("kv_heads", c_int32),
        ("page_size", c_int32),
        ("dim", c_int32),
        ("is_float", c_int32),
    ]


class Embed(Structure):
    KIND = Kind.EMBED
    _fields_ = [("table", POINTER(Packed)), ("out", c_void_p), ("scale", c_float)]


class Norm(Structure):
    KIND = Kind.NORM
    _fields_ = [
        ("x", c_void_p),
        ("added", c_void_p),
        ("post", c_void_p),
        ("gain", c_void_p),
        ("out", c_void_p),
        ("quants", POINTER(Quants)),
        ("eps", c_float),
        ("width", c_int32),
        ("only_last", c_int32),
    ]


class Gemm(Structure):
    KIND = Kind.GEMM
    _fields_ = [
        ("weight", POINTER(Packed)),
        ("in_", POINTER(Quants)),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("columns", c_int32),
        ("stride", c_int32),
        ("only_last", c_int32),
    ]


class Rope(Structure):
    KIND = Kind.ROPE
    _fields_ = [
        ("qkv", c_void_p),
        ("gain", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("queries", c_void_p),
        ("arena", Arena),
        ("heads", c_int32),
        ("eps", c_float),
        ("query_scale", c_float),
    ]


class Attend(Structure):
    KIND = Kind.ATTEND
    _fields_ = [
        ("queries", c_void_p),
        ("arena", Arena),
        ("out", c_void_p),
        ("quants", POINTER(Quants)),
        ("scratch", c_void_p),
        ("heads", c_int32),
        ("window", c_int32),
        ("scratch_floats", c_int64),
        ("threads", c_int32),
        ("padding", c_int32),
    ]


class Gate(Structure):
    KIND = Kind.GATE
    _fields_ = [
        ("in_", c_void_p),
        ("out", c_void_p),
        ("quants", POINTER(Quants)),
        ("width", c_int32),
        ("is_gelu", c_int32),
    ]


class Best(Structure):
    KIND = Kind.BEST
    _fields_ = [
        ("logits", c_void_p),
        ("ids", c_void_p),
        ("values", c_void_p),
        ("columns", c_int32),
    ]


class Op(Structure):
    _fields_ = [("kind", c_int32), ("padding", c_int32), ("args", c_void_p)]


STRUCTS = (
    *(Packed, Quants, Span, Step, Arena),
    *(Embed, Norm, Gemm, Rope, Attend, Gate, Best, Op),
)
Args = Embed | Norm | Gemm | Rope | Attend | Gate | Best

# Name → result, arguments. Arrays are addresses; see host.cpp and pack.cpp.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "kagari_open": (c_int32, [c_int32, c_int32]),
    "kagari_close": (None, []),
    "kagari_tier_name": (c_char_p, []),
    "kagari_run": (None, [c_void_p, c_int32, POINTER(Step)]),
    "kagari_start": (None, [c_void_p, c_int32, POINTER(Step)]),
    "kagari_finish": (None, []),
    "kagari_attention_scratch": (c_int64, [c_int32] * 5),
    "kagari_pool_stats": (None, [POINTER(c_int64)]),
    "kagari_verify_tags": (None, [c_void_p] * 4 + [c_int64, c_void_p]),
    "kagari_sizeof": (c_int64, [c_int32]),
    "kagari_packed_bytes": (c_int64, [c_int64, c_int64, c_int32, c_int32, c_int32, c_int32]),
    "kagari_ggml_form": (c_int32, [c_int32] + [POINTER(c_int32)] * 4),
    "kagari_pack_ggml": (c_int32, [c_int32, c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "kagari_pack": (None, [c_void_p] * 3 + [POINTER(Packed), c_void_p]),
}


@dataclass(frozen=True, slots=True)
class Program:
    """Ops in the order they run, and the structs they point to."""

    ops: ctypes.Array[Op]
    args: tuple[Args, ...]

    def __len__(self) -> int:
        return len(self.args)


def program(args: Sequence[Args]) -> Program:
    """The ops that these arguments mean, by their types."""
    ops = (Op * len(args))(*(Op(kind=of.KIND, args=ctypes.addressof(of)) for of in args))
    return Program(ops, tuple(args))


@dataclass(frozen=True, slots=True)
class PoolStats:
    jobs: int
    long_waits: int  # of the caller for a chunk of another thread, over 1 ms
    longest_wait_us: int
    workers: int  # beside the caller


class Library:
    """One tier of the kernels and its threads; both belong to the process: the last load holds.

    One thread at a time may call; calls release the interpreter's lock.
    """

    def __init__(
        self, functions: ctypes.CDLL, *, tier: str, threads: int, distrusted: tuple[str, ...] = ()
    ) -> None:
        self.functions = functions
        self.tier = tier
        self.threads = threads
        self._started: tuple[object, Step] | None = None  # kept alive
        self.distrusted = distrusted  # better tiers that this CPU has, but that compute wrongly

    def run(
        self,
        ops: Program | ctypes.Array[Op],
        step: Step,
        *,
        start: int = 0,
        count: int | None = None,
    ) -> None:
        """Carries out ops[start : start + count], by default all from start on, one by one."""
        array = ops.ops if isinstance(ops, Program) else ops
        count = len(array) - start if count is None else count
        assert 0 <= start <= start + count <= len(array), "within the program"
        first = ctypes.addressof(array) + start * ctypes.sizeof(Op)
        self.functions.kagari_run(first, count, ctypes.byref(step))

    def start(self, ops: Program | ctypes.Array[Op], step: Step, count: int) -> None:
        """Lets another thread carry out the first ops; what they read must stay until finish."""
        array = ops.ops if isinstance(ops, Program) else ops
        assert 0 <= count <= len(array), "within the program"
        assert self._started is None, "one program at a time"
        self._started = ops, step
        self.functions.kagari_start(ctypes.addressof(array), count, ctypes.byref(step))

    def finish(self) -> None:
        """Helps with what was started, until it is done; at once if nothing was."""
        self.functions.kagari_finish()
        self._started = None

    def stats(self) -> PoolStats:
        counts = (c_int64 * 4)()
        self.functions.kagari_pool_stats(counts)
        return PoolStats(*counts)

    def close(self) -> None:
        """Ends the threads; a later run does everything on the caller's."""
        self.functions.kagari_close()


_absent: list[str] = []


def why_absent() -> str | None:
    """Why the last load gave None."""
    return _absent[-1] if _absent else None


def load(*, tier: str | None = None, threads: int = 1) -> Library | None:
    """The kernels of a tier, by default KAGARI_CPU_TIER's, else the best this CPU has.

    None where they are switched off or cannot be built: why_absent says why. A tier that fails its
    self-check is passed over for the next lower one: see Library.distrusted. threads counts the
    caller. Raises ConfigError for a tier that does not exist or that this CPU lacks, OSError when
    threads cannot be started.
    """
    from engine.execute.kernels.cpu import self_check  # which imports this module

    field, tier = ("tier", tier) if tier else (TIER_VARIABLE, os.environ.get(TIER_VARIABLE) or None)
    if tier == "off":
        _absent[:] = [f"{TIER_VARIABLE} is off"]
        return None
    if tier not in (None, *TIERS):
        raise _wrong_tier(field, tier, allowed=", ".join((*TIERS, "off")))
    try:
        functions = _built()
    except build.NoKernels as error:
        _absent[:] = [str(error)]
        return None
    best = functions.kagari_open(TIERS.index(tier) if tier else -1, 1)
    if best < 0:
        raise _wrong_tier(field, tier, allowed="a tier whose instructions this CPU has")
    index = next(index for index in range(best, -1, -1) if self_check.agrees(functions, index))
    if functions.kagari_open(index, threads) < 0:
        raise OSError(f"{threads} threads cannot be started")
    distrusted = TIERS[index + 1 : best + 1]
    return Library(functions, tier=TIERS[index], threads=threads, distrusted=distrusted)


def _wrong_tier(field: str, tier: str | None, *, allowed: str) -> ConfigError:
    return ConfigError(
        field, found=tier, allowed=allowed, remedy="leave it out for the best this CPU has"
    )


def _built() -> ctypes.CDLL:
    path = build.library_file()
    try:
        return open_file(path)
    except OSError:  # whole, but of another system: compile it here
        build.discard(path)
    try:
        return open_file(build.library_file())
    except OSError as error:
        raise build.NoKernels(f"the compiled kernels cannot be loaded: {error}") from error


@functools.cache
def open_file(path: Path) -> ctypes.CDLL:
    """The functions of a library file, with types. Raises OSError, or AttributeError when one is
    missing."""
    functions = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    for index, struct in enumerate(STRUCTS):
        size = functions.kagari_sizeof(index)
        assert size == ctypes.sizeof(struct), f"{struct.__name__} has {size} bytes in abi.h"
    return functions
