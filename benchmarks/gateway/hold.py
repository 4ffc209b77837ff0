"""The longest time that one callback keeps the loop, under streams and requests of all sizes."""

from __future__ import annotations

import signal
import time

import msgspec

from benchmarks.gateway.against import CASES, requests
from benchmarks.gateway.bodies import body
from benchmarks.gateway.http_load import Answer, Load, post
from benchmarks.gateway.probe import Found
from benchmarks.gateway.processes import KEY, gateway, nodes
from benchmarks.gateway.rows import Bench

STREAMS, RATE, AT_A_TIME = 64, 50, 4


def longest_hold(bench: Bench) -> None:
    """64 streams × 50/s beside JSON requests of 1, 8 and 120 KB with one new message each."""
    out = bench.folder / "holds.json"
    module = ("benchmarks.gateway.probe", str(out))
    with (
        gateway(bench.folder, module=module) as served,
        nodes(bench, served.link_url, tick_s=1 / RATE),
    ):
        served.wait_for_model()
        load = Load("127.0.0.1", served.port)
        stream = post(body(400, 100_000, stream=True), KEY)
        for _ in range(STREAMS):
            load.until_reads(load.send(stream), 1)
        sizes = [requests(chars, messages, fresh=True) for _, chars, messages, *_ in CASES]
        sent = 0

        def again(answer: Answer) -> None:
            nonlocal sent
            sent += 1
            load.send(next(sizes[sent % len(sizes)]), answer.socket)

        for _ in range(AT_A_TIME):
            load.send(next(sizes[0]))
        warm = time.monotonic() + 3
        load.run(lambda: time.monotonic() >= warm, again)
        served.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + (6 if bench.quick else 30)
        load.run(lambda: time.monotonic() >= end, again)
        load.end()
    found = msgspec.json.decode(out.read_bytes(), type=Found)
    told = ", ".join(
        f"{hold.held_ms:.2f} {hold.what} (computing {hold.computing_ms:.2f},"
        f" collecting {hold.collecting_ms:.2f}, asleep {hold.asleep_ms:.2f})"
        for hold in found.longest[:5]
    )
    bench.add(
        "longest hold of the loop",
        found.longest[0].held_ms,
        2,
        0.5,
        "ms",
        detail=f"of {found.callbacks} callbacks on asyncio's own loop: {told}",
    )
