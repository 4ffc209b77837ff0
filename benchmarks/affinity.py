"""What a session's header is worth: generated agents on modelled nodes with caches of their own.

The live policy chooses. Without page events it knows nothing of caches, as with engines that tell
of none and prompts without keys, so only the header brings a session back to its pages; with them
the header should make no difference. Agents wait for each answer before their next turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

from benchmarks.beside import Beside, JsonRow, compared
from gateway.lab.live_router import LiveRouter
from gateway.lab.nodes import HOST, NodeSpec
from gateway.lab.outcomes import Summary, summarise
from gateway.lab.run import play
from gateway.lab.view import Told
from gateway.lab.workload import Agents
from gateway.nodes.fleet import default_parameters

NODES = (8, 12)
SHARES = (0.0, 0.5, 0.75, 1.0)
SESSIONS_PER_S = 0.025  # and node
TRAFFIC = 0.5  # sessions per s, of all nodes together
ENOUGH_S = 4.0  # first token p90 of that traffic: then there are enough nodes
MAX_NODES = 24


def run(
    nodes: int, *, sessions_per_s: float, share: float, events: bool, until_s: float
) -> Summary:
    agents = Agents(sessions_per_s=sessions_per_s, until_s=until_s, signal_share=share)
    router = LiveRouter(default_parameters(), sees_pages=events)
    specs = [NodeSpec(tiers=(HOST,))] * nodes
    outcome = play(agents.requests(), specs, router, Told(is_on=events), until_s=until_s)
    return summarise(outcome.works, outcome.nodes)


def nodes_needed(*, share: float, events: bool, until_s: float) -> int:
    """The fewest that serve TRAFFIC well enough; MAX_NODES if even they do not."""
    for nodes in range(2, MAX_NODES):
        one = run(nodes, sessions_per_s=TRAFFIC, share=share, events=events, until_s=until_s)
        if one.ttft_p90_s <= ENOUGH_S:
            return nodes
    return MAX_NODES


def cached_shares(nodes: int, *, until_s: float) -> list[Beside]:
    """By share of sessions with a header, beside none; and with page events beside without."""
    made: list[Beside] = []

    def cached(share: float, *, events: bool) -> Summary:
        return run(
            nodes,
            sessions_per_s=SESSIONS_PER_S * nodes,
            share=share,
            events=events,
            until_s=until_s,
        )

    def tell(name: str, one: Summary, peers: Mapping[str, float]) -> None:
        detail = (
            f"first token p50 {one.ttft_p50_s:.2f} s p90 {one.ttft_p90_s:.2f} s,"
            f" goodput {one.goodput:.3f}"
        )
        row = compared(
            f"cached share, {nodes} nodes, {name}",
            one.hit,
            peers,
            "of the prompt tokens",
            more_is_better=True,
            detail=detail,
        )
        print(f"{row}; {detail}", flush=True)
        made.append(row)

    without = cached(0.0, events=False)
    for share in SHARES:
        one = cached(share, events=False)
        tell(f"{share:.0%} with header", one, {"no header": without.hit})
    for share in (0.0, 1.0):
        one = cached(share, events=True)
        peers = {"no events": cached(share, events=False).hit}
        tell(f"{share:.0%} with header, page events", one, peers)
    return made


def needed(*, until_s: float) -> list[Beside]:
    """Nodes for one traffic, equally well served."""
    made: list[Beside] = []
    settings = [(share, False) for share in SHARES] + [(0.0, True), (1.0, True)]
    without = 0
    for share, events in settings:
        nodes = nodes_needed(share=share, events=events, until_s=until_s)
        without = without or nodes
        name = f"nodes needed, {share:.0%} with header" + (", page events" if events else "")
        unit = f"nodes for a first token p90 of {ENOUGH_S:g} s"
        row = compared(name, nodes, {"no header": without}, unit, more_is_better=False)
        print(row, flush=True)
        made.append(row)
    return made


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="15 minutes of agents instead of 40")
    flags.add_argument("--json", metavar="FILE", help="write the rows there")
    options = flags.parse_args()
    started = perf_counter()
    until_s = 900.0 if options.quick else 2400.0
    rows = [row for nodes in NODES for row in cached_shares(nodes, until_s=until_s)]
    rows += needed(until_s=until_s)
    print(f"{perf_counter() - started:.0f} s")
    if options.json:
        made: list[JsonRow] = [json_row for row in rows for json_row in row.rows()]
        Path(options.json).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
