"""Hit ratios of tiers on a production trace, the policy beside LRU and the best possible choice.

Ratios of 1 or more mean that ours is better. A model: computing and fetching take no time here.
"""

from __future__ import annotations

import argparse
import gc
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter, process_time

from benchmarks.beside import Beside, JsonRow, absent_rows, compared
from benchmarks.tiering.replay import (
    Node,
    make_node,
    replay,
    replay_best,
    replay_infinite,
    replay_lru,
    replay_policy,
)
from benchmarks.tiering.trace import OWNER, PAGE_TOKENS, Request, agent_requests, read_trace
from benchmarks.trace_file import TRACE, find_trace, read_or_exit
from policies.contract.wire import Tier
from policies.tiering import Resident, TierIndex

SIZES_M = (1.5, 5.1, 15.4)  # tokens
AGENT_SIZES_M = (0.5, 1.5, 5.0)

# One node, in tokens: an accelerator's pool beside its weights, host memory four times that, a disk
# four times that again, and a store that several nodes fill.
NODE_TOKENS: dict[Tier, float] = {"device": 0.5e6, "host": 2e6, "disk": 8e6, "cluster": 32e6}

NUM_PAGES = 100_000
CHAIN_PAGES = 100


def tell(row: Beside) -> Beside:
    print(f"{row}  {row.detail}", flush=True)
    return row


def beside_lru(requests: list[Request], sizes_m: tuple[float, ...], whose: str) -> list[Beside]:
    rows: list[Beside] = []
    for size in sizes_m:
        pages = int(size * 1e6 / PAGE_TOKENS)
        ours = replay_policy(requests, pages)
        peers = {
            "LRU, tail first": replay_lru(requests, pages, tail_first=True),
            "LRU": replay_lru(requests, pages, tail_first=False),
        }
        name, unit = f"{whose} in {size} M", "of the prompt tokens"
        rows.append(tell(compared(name, ours, peers, unit, more_is_better=True)))
        best = {"best possible": replay_best(requests, pages)}
        name = f"{whose} in {size} M, of the possible"
        rows.append(tell(compared(name, ours, best, unit, more_is_better=True)))
    return rows


def by_tier(requests: list[Request]) -> list[Beside]:
    """Each row adds a tier; beside what an infinite cache finds."""
    rows: list[Beside] = []
    most = {"infinite cache": replay_infinite(requests)}
    names = list(NODE_TOKENS)

    def row(name: str, node: Node) -> None:
        tally = replay(requests, lambda _: node)
        found = ", ".join(f"{at} {hit / tally.prompt:.3f}" for at, hit in tally.hits.items())
        written = tally.written.get("disk", 0) * PAGE_TOKENS / 1e6
        detail = f"found in {found}" + (f"; {written:.1f} M tokens written to disk" * bool(written))
        unit = "of the prompt tokens"
        rows.append(
            tell(compared(name, tally.ratio, most, unit, more_is_better=True, detail=detail))
        )

    for count in range(1, len(names) + 1):
        sizes = {name: NODE_TOKENS[name] for name in names[:count]}
        row("hits with " + " + ".join(names[:count]), make_node(sizes))
        if names[count - 1] == "disk":
            every = make_node(sizes, disk_needs_second_use=False)
            row("the same, disk takes every page", every)
    return rows


def two_nodes(requests: list[Request]) -> list[Beside]:
    """Requests sent anywhere, beside sessions pinned to a node; modelled, not run."""
    rows: list[Beside] = []
    local = {name: size for name, size in NODE_TOKENS.items() if name != "cluster"}

    random = Random(1)
    tossed = [random.randrange(2) for _ in requests]
    pinned = [one.session % 2 for one in requests]

    def ratio(places: list[int], *, is_shared: bool) -> float:
        shared: dict[Tier, TierIndex] = {}
        if is_shared:
            shared["cluster"] = TierIndex(int(NODE_TOKENS["cluster"] / PAGE_TOKENS))
        pair = [make_node(local, shared=shared) for _ in range(2)]
        place = iter(places)
        return replay(requests, lambda _: pair[next(place)]).ratio

    for is_shared in (True, False):
        anywhere = ratio(tossed, is_shared=is_shared)
        peers = {"pinned": ratio(pinned, is_shared=is_shared)}
        store = "a shared store" if is_shared else "no shared store"
        name, unit = f"random routing, {store}", "of the prompt tokens"
        rows.append(tell(compared(name, anywhere, peers, unit, more_is_better=True)))
    return rows


def index_costs() -> list[Beside]:
    """Of one index with 100,000 pages in chains of 100, full from the start."""
    chains: list[list[Resident]] = []
    for name in range(2 * NUM_PAGES // CHAIN_PAGES):
        keys = [b"%015d/%016d" % (name, depth) for depth in range(-1, CHAIN_PAGES)]
        pages = zip(keys, keys[1:], range(CHAIN_PAGES), strict=False)
        chains.append([Resident(key, parent, depth, OWNER) for parent, key, depth in pages])
    half = len(chains) // 2
    index = TierIndex(NUM_PAGES)
    tracemalloc.start()
    for number, chain in enumerate(chains[:half]):
        index.touch([page.key for page in chain], number)
        for page in chain:
            index.admit(page, number)
    gc.collect()
    bytes_held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    keys_by_chain = [[page.key for page in chain] for chain in chains]
    spent: dict[str, float] = {}

    def clock(what: str, work: Callable[[], None]) -> None:
        started = process_time()
        work()
        spent[what] = (process_time() - started) / NUM_PAGES * 1e9

    def touch(keys_by_chain: list[list[bytes]]) -> None:
        for number, keys in enumerate(keys_by_chain):
            index.touch(keys, half + number)

    def admit() -> None:
        for chain in chains[half:]:
            for page in chain:
                assert index.admit(page, 2.0 * half)

    clock("touch of a held page", lambda: touch(keys_by_chain[:half]))
    clock("touch of a missing page", lambda: touch(keys_by_chain[half:]))
    clock("admit with an eviction", admit)
    rows = [compared(what, ns, {}, "ns", more_is_better=False) for what, ns in spent.items()]
    each = bytes_held / NUM_PAGES
    rows.append(compared("memory for a held page", each, {}, "bytes", more_is_better=False))
    return [tell(row) for row in rows]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="the first 15 minutes of the trace")
    flags.add_argument("--json", metavar="FILE", help="write the rows there")
    flags.add_argument("--trace", metavar="FILE", help=f"gzipped JSON lines (../{TRACE})")
    options = flags.parse_args()
    started = perf_counter()
    trace = find_trace(options.trace)
    requests: list[Request] = []
    if isinstance(trace, Path):
        until_s = 900.0 if options.quick else float("inf")
        requests = read_or_exit(trace, lambda path: read_trace(path, until_s=until_s))
    rows, absent = index_costs(), dict[str, str]()
    for pause_s in (12.0, 60.0):
        agents = agent_requests(pause_s=pause_s, until_s=900.0 if options.quick else 2400.0)
        rows += beside_lru(agents, AGENT_SIZES_M, f"agents, {pause_s:g} s")
    if isinstance(trace, Path):
        tokens = sum(one.tokens for one in requests)
        print(f"{len(requests)} requests, {tokens / 1e6:.1f} M prompt tokens", flush=True)
        rows += beside_lru(requests, SIZES_M, "trace") + by_tier(requests) + two_nodes(requests)
    else:
        absent = dict.fromkeys(("hits beside LRU", "hits by tier", "two nodes"), trace)
        for name, why in absent.items():
            print(f"absent: {name}: {why}")
    print(f"{perf_counter() - started:.0f} s")
    if options.json:
        made: list[JsonRow] = [json_row for row in rows for json_row in row.rows()]
        Path(options.json).write_text(json.dumps(made + absent_rows(absent), indent=1) + "\n")


if __name__ == "__main__":
    main()
