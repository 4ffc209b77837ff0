"""The public request trace that some benchmarks replay: where it is, or that it is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

TRACE = Path("shared/traces/conversation_trace.jsonl.gz")

Read = TypeVar("Read")


def find_trace(given: str | None) -> Path | str:
    """The trace, or why there is none. Exits when the one that was asked for is not there."""
    if given is None:
        path = Path(__file__).parents[2] / TRACE
        why = f"no ../{TRACE}; give --trace FILE (a trace of the Mooncake FAST'25 release)"
        return path if path.is_file() else why
    if not Path(given).is_file():
        sys.exit(
            "error: --trace\n"
            f"  found:   no file {given}\n"
            "  allowed: a gzipped trace of the Mooncake FAST'25 release\n"
            "  remedy:  gzip FAST25-release/traces/conversation_trace.jsonl of its project"
        )
    return Path(given)


def read_or_exit(path: Path, read: Callable[[Path], Read]) -> Read:
    """What read makes of it. Exits when it is no such trace."""
    try:
        return read(path)
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(
            f"error: --trace\n  found:   {path}: {error}\n"
            "  allowed: gzipped lines with timestamp, input_length, output_length and hash_ids\n"
            "  remedy:  give a trace of the Mooncake FAST'25 release"
        )
