"""What a node says first, checked: versions that meet, names safe to show, sane engines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from policies.contract import wire
from policies.contract.wire import EngineInfo, Hello, Refused

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it becomes a response header
MAX_ENGINES = 64
MIN_PAGE_SIZE = 16


def refuse_hello(hello: Hello) -> Refused | None:
    """Why this node cannot join, or None."""
    if hello.version < wire.MIN_WIRE_VERSION or hello.min_version > wire.WIRE_VERSION:
        return Refused(
            "wire_version",
            f"the node speaks wire versions {hello.min_version} to {hello.version}, this gateway"
            f" {wire.MIN_WIRE_VERSION} to {wire.WIRE_VERSION}; upgrade the older one",
        )
    if _NODE_ID.fullmatch(hello.node_id) is None:
        return Refused(
            "bad_node_id",
            f"node_id is {hello.node_id[:80]!a}, allowed are up to 64 letters, digits and ._-;"
            " give another --node-id",
        )
    problem = find_problem(hello.engines)
    return None if problem is None else Refused("bad_engine", problem)


def find_problem(engines: Sequence[EngineInfo]) -> str | None:
    """What in a node's list of engines cannot be worked with, or None."""
    if len(engines) > MAX_ENGINES:
        return f"engines: {len(engines)} found, allowed are {MAX_ENGINES}"
    if len({info.engine for info in engines}) < len(engines):
        return "engines: an index comes twice, allowed is once"
    for info in engines:
        size = info.page_size
        if size < MIN_PAGE_SIZE or size & (size - 1):
            return f"page_size of engine {info.engine} is {size}, allowed is a power of two >= 16"
        if info.context_tokens < 1 or info.num_pages < 1 or info.engine < 0:
            return f"engine {info.engine}: context_tokens and num_pages must be at least 1"
    return None
