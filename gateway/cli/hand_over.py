"""Become another of our programs: `kagari node …` is `python -m node_agent …`, same process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gateway.cli.children import python_module


def hand_over(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process, so that signals and the exit code need no forwarding."""
    sys.stdout.flush()
    os.execv(sys.executable, python_module(module, *arguments))
