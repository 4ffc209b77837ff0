"""The whole gateway, a process of its own, under streams, JSON requests and leaving clients."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.gateway.bodies import body
from benchmarks.gateway.http_load import Answer, Load, post
from benchmarks.gateway.processes import KEY, gateway, nodes
from benchmarks.gateway.rows import Bench, Pair, percentile
from benchmarks.gateway.scripted_nodes import Log


def read_log(path: Path) -> Log:
    return msgspec.json.decode(path.read_bytes(), type=Log)


def streaming(bench: Bench, streams: int, rate: int) -> None:
    """All streams step together; a chunk's delay runs from its oldest token's frame to our read."""
    seconds = 4 if bench.quick else 15
    with gateway(bench.folder) as served:
        with nodes(bench, served.link_url, tick_s=1 / rate) as (_, path):
            served.wait_for_model()
            load = Load("127.0.0.1", served.port)
            request = post(body(400, 100_000, stream=True), KEY)
            answers: list[Answer] = []
            for _ in range(streams):
                answers.append(load.send(request))
                load.until_reads(answers[-1], 1)
            load.for_s(1.0)
            began, cpu = time.monotonic(), served.cpu_s()
            load.for_s(seconds)
            ended, used = time.monotonic(), served.cpu_s() - cpu
            load.end()
            time.sleep(0.5)
        log = read_log(path)
    delays: list[float] = []
    tokens = chunks = 0
    for answer in answers:
        _, node, first = log.submits[answer.request_id]
        steps = log.steps[node]
        seen = 0
        for at, marks in answer.reads:
            if began <= at <= ended:
                delays.append((at - steps[first + seen]) * 1e3)
                tokens += marks
                chunks += 1
            seen += marks
    made = sum(1 for at in log.steps[0] if began <= at <= ended) * streams
    print(f"  {tokens / chunks:.2f} tokens a chunk, core {used / seconds:.2f}", file=sys.stderr)
    budget = STREAM_BUDGETS[streams, rate]
    name = f"{streams} × {rate}/s"
    if budget.share is not None:
        bench.add(f"{name}: share of rate", tokens / made, *budget.share, "", more_is_better=True)
    if budget.token_us is not None:
        bench.add(f"{name}: CPU per token", used / tokens * 1e6, *budget.token_us, "µs")
    bench.add(f"{name}: chunk delay p50", percentile(delays, 0.5), *budget.p50, "ms")
    bench.add(f"{name}: chunk delay p99", percentile(delays, 0.99), *budget.p99, "ms")


@dataclass(frozen=True)
class StreamBudget:
    """(must, good) of each figure."""

    p50: Pair
    p99: Pair
    share: Pair | None = None
    token_us: Pair | None = None


STREAM_BUDGETS = {
    (64, 200): StreamBudget(p50=(1.6, 0.8), p99=(5, 3), token_us=(40, 24)),
    (256, 200): StreamBudget(p50=(15, 5), p99=(30, 12), share=(0.93, 0.99)),
}


def first_token(bench: Bench, streams: int, must: float, good: float) -> None:
    """New requests while streams × 50/s run: time to the first chunk less the node's own wait."""
    with gateway(bench.folder) as served:
        with nodes(bench, served.link_url, tick_s=0.02) as (_, path):
            served.wait_for_model()
            load = Load("127.0.0.1", served.port)
            request = post(body(400, 100_000, stream=True), KEY)
            for _ in range(streams):
                load.until_reads(load.send(request), 1)
            probes: list[Answer] = []
            for number in range(40 if bench.quick else 200):
                connection = probes[-1].socket if probes else None  # kept alive, as harnesses do
                probe = load.send(post(body(400, 3, stream=True, turn=number), KEY), connection)
                load.until_done(probe)
                probes.append(probe)
                load.for_s(0.003 * (number % 7))  # at any moment of a step
            load.end()
            time.sleep(0.3)
        log = read_log(path)
    added: list[float] = []
    for probe in probes:
        received, node, first = log.submits[probe.request_id]
        node_wait = log.steps[node][first] - received
        added.append((probe.reads[0][0] - probe.sent_at - node_wait) * 1e3)
    bench.add(f"added first-token time, {streams} × 50/s", percentile(added, 0.5), must, good, "ms")


def json_requests(bench: Bench) -> None:
    """JSON requests of 1 KB, 16 at a time, answered at once with 40 tokens."""
    total = 2000 if bench.quick else 20_000
    with gateway(bench.folder) as served, nodes(bench, served.link_url):
        served.wait_for_model()
        load = Load("127.0.0.1", served.port)
        request = post(body(1000, 40, stream=False), KEY)
        done = 0

        def again(answer: Answer) -> None:
            nonlocal done
            done += 1
            load.send(request, answer.socket)

        for _ in range(16):
            load.send(request)
        load.run(lambda: done >= 300, again)
        began, cpu, before = time.monotonic(), served.cpu_s(), done
        load.run(lambda: done >= before + total, again)
        used, took, count = served.cpu_s() - cpu, time.monotonic() - began, done - before
        load.end()
    print(f"  {count / took:.0f} requests/s", file=sys.stderr)
    bench.add("whole JSON request, 1 KB, 16 at a time: CPU", used / count * 1e6, 450, 220, "µs")


def close_to_abort(bench: Bench) -> None:
    """A client leaves mid-stream: until the Abort is at the node."""
    left: dict[str, float] = {}
    with gateway(bench.folder) as served:
        with nodes(bench, served.link_url, tick_s=0.02) as (_, path):
            served.wait_for_model()
            load = Load("127.0.0.1", served.port)
            request = post(body(400, 100_000, stream=True), KEY)
            for _ in range(50 if bench.quick else 200):
                answer = load.send(request)
                load.until_reads(answer, 3)
                left[answer.request_id] = load.close(answer)
                time.sleep(0.02)
            load.end()
            time.sleep(0.5)
        log = read_log(path)
    missing = [one for one in left if one not in log.aborts]
    assert not missing, f"{len(missing)} of {len(left)} streams were never aborted"
    spans = [(log.aborts[one] - at) * 1e3 for one, at in left.items()]
    bench.add("close → Abort on the link, p99", percentile(spans, 0.99), 20, 2, "ms")


def memory(bench: Bench) -> None:
    """Resident memory with a tokenizer loaded: idle, then 256 streams and 100k page keys."""
    with gateway(bench.folder) as served:
        with nodes(bench, served.link_url, tick_s=0.02):
            served.wait_for_model()
            time.sleep(1.0)
            bench.add("memory, idle", served.rss_mb(), 120, 70, "MB")
        with nodes(bench, served.link_url, tick_s=0.02, page_keys=100_000):
            time.sleep(1.0)
            served.wait_for_model()
            load = Load("127.0.0.1", served.port)
            request = post(body(400, 100_000, stream=True), KEY)
            for _ in range(256):
                load.until_reads(load.send(request), 1)
            load.for_s(3 if bench.quick else 15)
            bench.add("memory, 256 streams and 100k page keys", served.rss_mb(), 150, 110, "MB")
            load.end()
