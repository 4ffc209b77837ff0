"""Scripted nodes on the real link, in one process: every stream gets a token with every tick.

Not an engine: prompts are not looked at. With a tick of 0 a request is answered whole at once.
What happened when is written at the end, by the machine's one monotonic clock:
{"submits": {request_id: [received, node, first step]}, "steps": [[time, …] per node],
"aborts": {request_id: time}}.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from policies.contract import wire
from policies.contract.bundle import bundle_digest, decode_bundle, tokenizer_digest

REPORT_S = 1.0
EVENTS_A_FRAME = 2048
MODEL = "scripted"


@dataclass
class Log:
    submits: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    aborts: dict[str, float] = field(default_factory=dict)
    steps: list[list[float]] = field(default_factory=list)


class ScriptedNode:
    """One node: its link, its lanes, its steps."""

    def __init__(self, index: int, options: argparse.Namespace, encoded: bytes, log: Log) -> None:
        bundle = decode_bundle(encoded)
        self.index = index
        self.tick_s: float = options.tick_s
        self.token_ids: list[int] = options.token_ids
        self.page_keys: int = options.page_keys
        self.encoded = encoded
        self.log = log
        self.left_by_lane: dict[int, int] = {}
        self.request_by_lane: dict[int, tuple[str, int]] = {}  # request_id, prompt tokens
        self.fresh: list[int] = []
        self.steps: list[float] = []
        log.steps.append(self.steps)
        self.info = wire.EngineInfo(
            engine=0,
            model=MODEL,
            identity=MODEL,
            context_tokens=bundle.context_tokens,
            page_size=bundle.page_size,
            num_pages=100_000,
            bundle_digest=bundle_digest(encoded),
            tokenizer_digest=tokenizer_digest(bundle.tokenizer_json),
            layout_id="none",
            weights_digest="none",
            weights_precision="none",
            kv_precision="none",
            compute="exact",
            step_tokens=1 << 20,  # it computes nothing, so nothing has to wait for it
            prefill_tokens_per_s=1e6,
        )

    async def run(self, url: str, token: str) -> None:
        try:
            await self._serve(url, token)
        except* ConnectionClosed:
            self.left_by_lane.clear()  # the gateway ended the link; what matters is in the log

    async def _serve(self, url: str, token: str) -> None:
        async with connect(
            url,
            additional_headers={"Authorization": f"Bearer {token}"},
            compression=None,
            max_size=wire.MAX_FRAME_BYTES,
            proxy=None,
            ping_interval=2,
            ping_timeout=4,
            close_timeout=1,
        ) as socket:
            hello = wire.Hello(
                wire.WIRE_VERSION, 1, f"s{self.index}", time.time_ns(), "mixed", (self.info,)
            )
            await socket.send(wire.encode(hello))
            await self._on_welcome(socket, await socket.recv(decode=False))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._report(socket, hello.node_epoch))
                tasks.create_task(self._read(socket))
                if self.tick_s:
                    tasks.create_task(self._step(socket))

    async def _on_welcome(self, socket: ClientConnection, frame: bytes) -> None:
        welcome = wire.decode_from_gateway(frame)
        assert isinstance(welcome, wire.Welcome), welcome
        size = wire.BUNDLE_PART_BYTES
        for digest in welcome.wanted_bundles:
            pieces = [
                self.encoded[start : start + size] for start in range(0, len(self.encoded), size)
            ]
            for index, piece in enumerate(pieces):
                await socket.send(wire.encode(wire.BundlePart(digest, index, len(pieces), piece)))
        keys: list[wire.PageEvent] = [wire.CacheCleared()]
        keys += [wire.PageStored(os.urandom(16)) for _ in range(self.page_keys)]
        for start in range(0, len(keys), EVENTS_A_FRAME):
            events = keys[start : start + EVENTS_A_FRAME]
            frame = wire.encode(wire.PageEvents(0, start, events, snapshot=start == 0))
            await socket.send(frame)

    async def _report(self, socket: ClientConnection, epoch: int) -> None:
        for number in itertools.count(1):
            engine = wire.EngineReport(0, "ready", running_sequences=len(self.left_by_lane))
            await socket.send(wire.encode(wire.Report(epoch, number, "ready", (engine,))))
            await asyncio.sleep(REPORT_S)

    async def _read(self, socket: ClientConnection) -> None:
        async for frame in socket:
            now = time.monotonic()
            match wire.decode_from_gateway(frame):  # type: ignore[arg-type]
                case wire.Submit(request_id, _, _, (lane,), prompt) as submit:
                    self.log.submits[request_id] = (now, self.index, len(self.steps))
                    self.left_by_lane[lane] = submit.sampling.max_tokens
                    self.request_by_lane[lane] = (request_id, len(prompt) // 4)
                    self.fresh.append(lane)
                    if not self.tick_s:
                        await socket.send(self._whole_answer(lane))
                case wire.Abort(lanes):
                    for lane in lanes:
                        if lane in self.left_by_lane:
                            self.log.aborts[self.request_by_lane[lane][0]] = now
                            ended = self._end(lane, "abort")
                            await socket.send(wire.encode(wire.Step(0, 0, [], [], [ended])))

    def _whole_answer(self, lane: int) -> bytes:
        self.fresh.clear()
        count = self.left_by_lane[lane]
        rare: list[wire.Rare] = [wire.Started(lane, 0), self._end(lane, "length", count)]
        ids = (self.token_ids * (count // len(self.token_ids) + 1))[:count]
        return wire.encode(wire.Step(0, 0, [lane] * count, ids, rare))

    def _end(self, lane: int, reason: wire.FinishReason, produced: int = 0) -> wire.Finished:
        del self.left_by_lane[lane]
        _, prompt_tokens = self.request_by_lane.pop(lane)
        return wire.Finished(lane, reason, wire.Usage(prompt_tokens, 0, produced))

    async def _step(self, socket: ClientConnection) -> None:
        due = time.monotonic()
        ids = itertools.cycle(self.token_ids)
        while True:
            due += self.tick_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            lanes = list(self.left_by_lane)
            rare: list[wire.Rare] = [
                wire.Started(lane, 0) for lane in self.fresh if lane in self.left_by_lane
            ]
            self.fresh.clear()
            for lane in lanes:
                self.left_by_lane[lane] -= 1
                if self.left_by_lane[lane] == 0:
                    rare.append(self._end(lane, "length"))
            tokens = list(itertools.islice(ids, len(lanes)))
            self.steps.append(time.monotonic())
            if lanes:
                await socket.send(wire.encode(wire.Step(0, len(self.steps), lanes, tokens, rare)))


async def main(options: argparse.Namespace, encoded: bytes, log: Log) -> None:
    nodes = [ScriptedNode(index, options, encoded, log) for index in range(options.nodes)]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    running = [asyncio.create_task(node.run(options.url, options.token)) for node in nodes]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in [*running, stopping]:
        task.cancel()
    await asyncio.wait([*running, stopping])
    for task in running:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def parse(arguments: list[str]) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--url", required=True)
    flags.add_argument("--token", required=True)
    flags.add_argument("--bundle", required=True)
    flags.add_argument("--nodes", type=int, default=1)
    flags.add_argument("--tick-s", type=float, default=0.0)
    flags.add_argument("--page-keys", type=int, default=0)
    flags.add_argument("--token-ids", type=lambda text: [int(one) for one in text.split(",")])
    flags.add_argument("--core", type=int)
    flags.add_argument("--log")
    return flags.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    if chosen.core is not None:
        os.sched_setaffinity(0, {chosen.core})
    happened = Log()
    try:
        uvloop.run(main(chosen, Path(chosen.bundle).read_bytes(), happened))
    finally:
        if chosen.log:
            Path(chosen.log).write_bytes(msgspec.json.encode(happened))
