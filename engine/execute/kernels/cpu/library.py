"""The door to the compiled kernels: their structs and functions, and which of them serve."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.execute.kernels.cpu import build

ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
ISA_VARIABLE = "KAGARI_CPU_ISA"
PRECISIONS = ("bf16", "fp32", "int8", "fp8")  # of pages, by an Arena's number


# Mirrors of the structs in abi.h, where their fields are explained. Arrays are addresses: whoever
# fills a struct keeps what it points to.


def _all(kind: type[ctypes._SimpleCData[Any]], names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Packed(Structure):
    _fields_ = [("data", c_void_p), *_all(c_int32, "n k bits block wide has_min")]


class Quants(Structure):
    _fields_ = [
        *_all(c_void_p, "high low scales sums"),
        *_all(c_int32, "width few"),
        ("counts", c_void_p),
    ]


class Span(Structure):
    _fields_ = _all(c_int32, "first_row num_rows start first_page")


class Step(Structure):
    _fields_ = [
        *_all(c_int32, "rows num_spans num_last padding"),
        *_all(c_void_p, "ids positions slots_page spans pages last"),
    ]


class Arena(Structure):
    _fields_ = [
        ("data", c_void_p),
        *_all(c_int64, "page_stride layer_offset"),
        *_all(c_int32, "kv_heads page_size dim precision"),
    ]


class Embed(Structure):
    _fields_ = [("table", POINTER(Packed)), ("out", c_void_p), ("scale", c_float)]


class Norm(Structure):
    _fields_ = [
        *_all(c_void_p, "x added post gain out"),
        ("quants", POINTER(Quants)),
        ("eps", c_float),
        *_all(c_int32, "width only_last"),
    ]


class Gemm(Structure):
    _fields_ = [
        ("weight", POINTER(Packed)),
        ("in_", POINTER(Quants)),
        *_all(c_void_p, "bias out"),
        *_all(c_int32, "columns stride only_last"),
    ]


class Rope(Structure):
    _fields_ = [
        *_all(c_void_p, "qkv gain cos sin queries"),
        ("arena", Arena),
        ("heads", c_int32),
        *_all(c_float, "eps query_scale"),
    ]


class Attend(Structure):
    _fields_ = [
        ("queries", c_void_p),
        ("arena", Arena),
        ("out", c_void_p),
        ("quants", POINTER(Quants)),
        ("scratch", c_void_p),
        *_all(c_int32, "heads window"),
        ("scratch_floats", c_int64),
        *_all(c_int32, "threads padding"),
    ]


class Gate(Structure):
    _fields_ = [
        *_all(c_void_p, "in_ out"),
        ("quants", POINTER(Quants)),
        *_all(c_int32, "width is_gelu"),
    ]


class Best(Structure):
    _fields_ = [*_all(c_void_p, "logits ids values"), ("columns", c_int32)]


class Op(Structure):
    _fields_ = [*_all(c_int32, "kind padding"), ("args", c_void_p)]


Args = Embed | Norm | Gemm | Rope | Attend | Gate | Best
KINDS = (Embed, Norm, Gemm, Rope, Attend, Gate, Best)  # an Op's, by its args
STRUCTS = (Packed, Quants, Span, Step, Arena, *KINDS, Op)

# Name → result, arguments; see host.cpp and pack.cpp.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "kagari_open": (c_int32, [c_int32, c_int32]),
    "kagari_close": (None, []),
    "kagari_run": (None, [c_void_p, c_int32, POINTER(Step)]),
    "kagari_start": (None, [c_void_p, c_int32, POINTER(Step)]),
    "kagari_finish": (None, []),
    "kagari_attention_scratch": (c_int64, [c_int32] * 5),
    "kagari_pool_stats": (None, [POINTER(c_int64)]),
    "kagari_sizeof": (c_int64, [c_int32]),
    "kagari_packed_bytes": (c_int64, [POINTER(Packed)]),
    "kagari_ggml_form": (c_int32, [c_int32, c_int64, c_int64, POINTER(Packed)]),
    "kagari_pack_ggml": (None, [c_int32, c_void_p, c_int64, c_void_p, POINTER(Packed)]),
    "kagari_pack": (None, [c_void_p] * 3 + [c_int64, POINTER(Packed)]),
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
    ops = (Op * len(args))(
        *(Op(kind=KINDS.index(type(of)), args=ctypes.addressof(of)) for of in args)
    )
    return Program(ops, tuple(args))


@dataclass(frozen=True, slots=True)
class PoolStats:
    jobs: int
    beside: int  # threads beside the caller, without those that rest


class Library:
    """The kernels of an instruction set and their threads: the process has one of each.

    The last load holds. One thread at a time may call; calls release the interpreter's lock.
    """

    def __init__(
        self, functions: ctypes.CDLL, *, isa: str, threads: int, distrusted: tuple[str, ...] = ()
    ) -> None:
        self.functions = functions
        self.isa = isa
        self.has_words = isa in ("scalar", "avx2")  # see Quants in abi.h
        self.arithmetic = f"{isa}-{build.build_id(Path(functions._name))}"  # see models.model.Model
        self.threads = threads
        self._started: tuple[Program, Step] | None = None  # kept alive
        self.distrusted = distrusted  # better ones that this CPU has, but that compute wrongly

    def run(
        self, program: Program, step: Step, *, start: int = 0, count: int | None = None
    ) -> None:
        """Carries out `count` ops from start on, by default all, one by one."""
        count = len(program) - start if count is None else count
        assert 0 <= start <= start + count <= len(program), "within the program"
        first = ctypes.addressof(program.ops) + start * ctypes.sizeof(Op)
        self.functions.kagari_run(first, count, ctypes.byref(step))

    def start(self, program: Program, step: Step, count: int) -> None:
        """Lets another thread carry out the first ops; what they read must stay until finish."""
        assert 0 <= count <= len(program), "within the program"
        assert self._started is None, "one program at a time"
        self._started = program, step
        self.functions.kagari_start(ctypes.addressof(program.ops), count, ctypes.byref(step))

    def finish(self) -> None:
        """Helps with what was started, until it is done; at once if nothing was."""
        self.functions.kagari_finish()
        self._started = None

    def stats(self) -> PoolStats:
        counts = (c_int64 * 2)()
        self.functions.kagari_pool_stats(counts)
        return PoolStats(*counts)

    def close(self) -> None:
        """Ends the threads; a later run does everything on the caller's."""
        self.functions.kagari_close()


_absent: list[str] = []


def why_absent() -> str | None:
    """Why the last load gave None."""
    return _absent[-1] if _absent else None


def load(*, isa: str | None = None, threads: int = 1) -> Library | None:
    """The kernels of an instruction set, by default KAGARI_CPU_ISA's, else the best this CPU has.

    None where they are switched off or cannot be built: why_absent says why. One that
    fails its self-check is passed over for the next lower one: see Library.distrusted. threads
    counts the caller. Raises ConfigError for one that does not exist or that this CPU lacks,
    OSError when threads cannot be started.
    """
    from engine.execute.kernels.cpu import self_check  # which imports this module

    field, isa = ("isa", isa) if isa else (ISA_VARIABLE, os.environ.get(ISA_VARIABLE) or None)
    if isa == "off":
        _absent[:] = [f"{ISA_VARIABLE} is off"]
        return None
    if isa not in (None, *ISAS):
        raise _wrong_isa(field, isa, allowed=", ".join((*ISAS, "off")))
    try:
        functions = _built()
    except build.NoKernels as error:
        _absent[:] = [str(error)]
        return None
    best = functions.kagari_open(ISAS.index(isa) if isa else -1, 1)
    if best < 0:
        raise _wrong_isa(field, isa, allowed="one that this CPU has")
    index = next(index for index in range(best, -1, -1) if self_check.agrees(functions, index))
    if functions.kagari_open(index, threads) < 0:
        raise OSError(f"{threads} threads cannot be started")
    distrusted = ISAS[index + 1 : best + 1]
    return Library(functions, isa=ISAS[index], threads=threads, distrusted=distrusted)


def _wrong_isa(field: str, isa: str | None, *, allowed: str) -> ConfigError:
    return ConfigError(
        field, found=isa, allowed=allowed, remedy="leave it out for the best this CPU has"
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
    """The functions of a library file, with types. Raises OSError."""
    functions = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    for index, struct in enumerate(STRUCTS):
        size = functions.kagari_sizeof(index)
        assert size == ctypes.sizeof(struct), f"{struct.__name__} has {size} bytes in abi.h"
    return functions
