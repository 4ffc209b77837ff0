"""Our own parts of a request and of a token, inside this process."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from typing import Any

from benchmarks.gateway.bodies import SENTENCE, conversation
from benchmarks.gateway.rows import Bench, Pair, percentile
from benchmarks.gateway.scripted_nodes import MODEL
from gateway.api.chat_request import read_chat_request
from gateway.api.sse import ChatChunks
from gateway.config import LimitsConfig
from gateway.nodes.bundles import Bundles
from gateway.nodes.fleet import Fleet, FleetConfig
from gateway.nodes.session import Session
from gateway.nodes.streams import Dispatch
from gateway.text.model import TextModel
from policies.contract import wire
from policies.contract.bundle import bundle_digest
from policies.contract.page_keys import seed

SALT = bytes(32)
CONTEXT_TOKENS = 131_072  # the turn of 32k tokens must fit; no real engine is asked


def local_fleet(bench: Bench, **config: Any) -> tuple[Fleet, Session]:
    """A fleet with one node in memory whose frames nobody reads."""
    bundles = Bundles(TextModel.load)
    digest = bundle_digest(bench.bundle)
    bundles.put(digest, bench.text)
    fleet = Fleet(bundles, FleetConfig(max_in_flight=1024, **config))
    session = fleet.attach(
        wire.Hello(wire.WIRE_VERSION, 1, "local", 1, "mixed", (engine_info(bench, digest),))
    )
    assert isinstance(session, Session)
    return fleet, session


def engine_info(bench: Bench, digest: str) -> wire.EngineInfo:
    return wire.EngineInfo(
        engine=0,
        model=MODEL,
        identity=MODEL,
        context_tokens=CONTEXT_TOKENS,
        page_size=bench.text.page_size,
        num_pages=100_000,
        bundle_digest=digest,
        tokenizer_digest=bench.text.tokenizer_digest,
        layout_id="none",
        weights_digest="none",
        weights_precision="none",
        kv_precision="none",
        compute="exact",
        step_tokens=1 << 20,  # it computes nothing, so nothing has to wait for it
        prefill_tokens_per_s=1e6,
    )


def dispatch_of(
    number: int, prompt: array[int], keys: list[bytes], max_tokens: int = 100_000
) -> Dispatch:
    return Dispatch(
        request_id=f"bench-{number}",
        tenant="default",
        model=MODEL,
        prompt=prompt,
        page_keys=keys,
        salt=SALT,
        sampling=wire.Sampling(max_tokens=max_tokens),
        deadline_s=600.0,
        affinity_key=None,
    )


def own_work_per_token(bench: Bench) -> None:
    """Frame decode, dispatch, detokenise, stop strings, encode; 64 streams, nothing sent."""
    fleet, session = local_fleet(bench)
    prompt = array("I", range(100, 200))
    streams = [fleet.dispatch(dispatch_of(number, prompt, [])) for number in range(64)]
    while session.outbox.pop() is not None:
        pass
    outputs = [bench.text.output(["\n\nUser:", "</answer>"]) for _ in streams]
    chunks = ChatChunks(completion_id="c", created=1, model=MODEL, include_usage=False)
    ids = asyncio.run(bench.text.raw_prompt(SENTENCE * 20))
    steps = 500 if bench.quick else 3000
    lanes = list(range(64))
    frames = [
        wire.encode(wire.Step(0, step, lanes, [ids[(step + lane) % len(ids)] for lane in lanes]))
        for step in range(steps)
    ]
    began = time.process_time()
    sent = 0
    for frame in frames:
        fleet.receive(session, frame)
        for stream, output in zip(streams, outputs, strict=True):
            for burst in stream.take():  # what `next` does once it is awake
                sent += len(chunks.content(output.push(burst.tokens)))
    used = time.process_time() - began
    assert sent > 0
    for stream in streams:
        stream.abort()
    bench.add("own work per token", used / steps / 64 * 1e6, 4, 2, "µs")


def root_of(bench: Bench) -> bytes:
    return seed(
        identity=MODEL,
        tokenizer_digest=bench.text.tokenizer_digest,
        page_size=bench.text.page_size,
        salt=SALT,
    )


async def turn_of_32k(bench: Bench) -> None:
    """A conversation of 32k tokens grows by 200: text in to Submit queued, warm, median."""
    fleet, session = local_fleet(bench)
    messages = conversation(55, 3000)
    root = root_of(bench)
    spans: list[float] = []
    tokens = 0
    for turn in range(12 if bench.quick else 40):
        grown = f"Result {turn}: " + " ".join(str(turn * 7919 + one) for one in range(60))
        messages.append({"role": "user" if turn % 2 else "assistant", "content": grown})
        began = time.perf_counter()
        prompt = await bench.text.chat_prompt(messages)
        keys = bench.text.page_keys(root, prompt)
        stream = fleet.dispatch(dispatch_of(turn, prompt, keys))
        spans.append((time.perf_counter() - began) * 1e3)
        tokens = len(prompt)
        session.outbox.pop()
        stream.abort()
    bench.add(f"turn of {tokens // 1000}k tokens, 200 new", percentile(spans[2:], 0.5), 3, 1, "ms")


async def own_parts(bench: Bench, name: str, chars: int, messages: int, budget: Pair) -> None:
    """A warm request from body to Submit queued: decode, text, page keys, routing; median CPU."""
    fleet, session = local_fleet(bench)
    data = json.dumps(
        {"model": MODEL, "messages": conversation(messages, chars // messages), "max_tokens": 40}
    ).encode()
    root = root_of(bench)
    spans: list[float] = []
    for number in range(200 if bench.quick else 1000):
        began = time.process_time()
        request = read_chat_request(data, LimitsConfig())
        prompt = await bench.text.chat_prompt(request.messages)
        keys = bench.text.page_keys(root, prompt)
        stream = fleet.dispatch(dispatch_of(number, prompt, keys))
        spans.append((time.process_time() - began) * 1e6)
        session.outbox.pop()
        stream.abort()
    bench.add(f"own parts of a warm {name} request", percentile(spans[5:], 0.5), *budget, "µs")
