"""The link alone: the cost of a frame, and how soon a silent node is noticed."""

from __future__ import annotations

import asyncio
import signal
import time
from array import array
from typing import Any

from benchmarks.gateway.parts import dispatch_of
from benchmarks.gateway.processes import TOKEN, nodes
from benchmarks.gateway.rows import Bench
from benchmarks.gateway.scripted_nodes import MODEL
from gateway.nodes.bundles import Bundles
from gateway.nodes.fleet import Fleet, FleetConfig
from gateway.nodes.link import LinkServer
from gateway.nodes.streams import Stream
from gateway.text.model import TextModel
from policies.contract import wire


async def until(fact: Any, deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not fact():  # noqa: ASYNC110 (the fact is in another object's books)
            await asyncio.sleep(0.01)


async def frame_in(bench: Bench) -> None:
    """16 links × 50 frames/s × 64 events: CPU of link, decode and dispatch per frame."""
    fleet = Fleet(Bundles(TextModel.load), FleetConfig(max_in_flight=64))
    async with LinkServer(fleet, join_token=TOKEN).serve("127.0.0.1", 0) as port:
        url = f"ws://127.0.0.1:{port}/link/v1"
        with nodes(bench, url, nodes=16, tick_s=0.02):
            await until(lambda: (one := fleet.model(MODEL)) is not None and one.nodes == 16)
            prompt = array("I", range(100))
            streams = [fleet.dispatch(dispatch_of(n, prompt, [])) for n in range(16 * 64)]
            await until(lambda: all(stream.produced for stream in streams))
            await asyncio.sleep(1.0)
            before, cpu = sum(stream.produced for stream in streams), time.process_time()
            await asyncio.sleep(4 if bench.quick else 20)
            used = time.process_time() - cpu
            events = sum(stream.produced for stream in streams) - before
            for stream in streams:
                stream.abort()
            await asyncio.sleep(0.2)
    bench.add("frame in, 64 events, 16 links × 50/s", used / (events / 64) * 1e6, 90, 60, "µs")


async def silent_node(bench: Bench) -> None:
    """A node stops answering with its socket open: until its streams failed."""
    fleet = Fleet(Bundles(TextModel.load), FleetConfig())
    async with LinkServer(fleet, join_token=TOKEN).serve("127.0.0.1", 0) as port:
        url = f"ws://127.0.0.1:{port}/link/v1"
        with nodes(bench, url, tick_s=0.02) as (process, _):
            await until(lambda: fleet.model(MODEL) is not None)
            stream = fleet.dispatch(dispatch_of(0, array("I", range(100)), []))
            await stream.next()
            process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            end = await failed(stream)
            took = time.monotonic() - began
    assert end.code == "node_lost", end
    bench.add("silent node → its sequences failed", took, 7, 5, "s")


async def failed(stream: Stream) -> wire.Failed:
    async with asyncio.timeout(30):
        while True:
            (burst,) = await stream.next()
            if burst.end is not None:
                assert isinstance(burst.end, wire.Failed)
                return burst.end
