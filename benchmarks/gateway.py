"""The gateway against its budgets, with scripted nodes on the real link.

Gateway on one core, nodes and client on another when there are two. A ratio of 1 or more means that
the must is met. Rows that need other routers are not measured here and are named at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog
import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.http_load import MARK, Answer, Load, post
from benchmarks.scripted_nodes import MODEL, Log
from gateway.api.chat_request import read_chat_request
from gateway.api.sse import ChatChunks
from gateway.config import LimitsConfig
from gateway.nodes.bundles import Bundles
from gateway.nodes.fleet import Fleet, FleetConfig
from gateway.nodes.link import LinkServer
from gateway.nodes.session import Session
from gateway.nodes.streams import Dispatch, Stream
from gateway.text.model import TextModel
from policies.contract import wire
from policies.contract.bundle import bundle_digest, decode_bundle, encode_bundle
from policies.contract.page_keys import seed

TOKEN = "benchmark-join-token"
KEY = "sk-benchmark-0123456789abcdef"
SALT = bytes(32)
CONTEXT_TOKENS = 131_072  # the turn of 32k tokens must fit; no real engine is asked
ABSENT = (
    "requests per second against vllm-router (needs that router: make peers)",
    "longest single hold of the loop (needs a probe inside the gateway)",
)
DEFAULT_MODEL = "smollm2-135m"
Pair = tuple[float, float]  # must, good


@dataclass(frozen=True)
class Row:
    """A budget and what was measured; unit of ours, must and good alike."""

    name: str
    ours: float
    must: float
    good: float
    unit: str
    more_is_better: bool = False

    @property
    def ratio(self) -> float:
        return self.ours / self.must if self.more_is_better else self.must / max(self.ours, 1e-9)


@dataclass
class Bench:
    """What all measurements share."""

    quick: bool
    folder: Path
    bundle: bytes  # encoded
    text: TextModel
    mark_id: int
    rows: list[Row]

    def add(
        self,
        name: str,
        ours: float,
        must: float,
        good: float,
        unit: str,
        *,
        more_is_better: bool = False,
    ) -> None:
        self.rows.append(Row(name, ours, must, good, unit, more_is_better))
        row = self.rows[-1]
        print(
            f"{name}: {ours:.4g} {unit}, must {must:g}, ratio {row.ratio:.2f}",
            file=sys.stderr,
            flush=True,
        )


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timer_lag_ms(core: int) -> tuple[float, float]:
    """How late a 5 ms sleep on a core ends, p50 and p99: what others on this machine cost us."""
    pin(os.getpid(), core)
    late: list[float] = []
    for _ in range(200):
        began = time.monotonic()
        time.sleep(0.005)
        late.append((time.monotonic() - began - 0.005) * 1e3)
    return percentile(late, 0.5), percentile(late, 0.99)


# --- processes ------------------------------------------------------------------------------------


USABLE = sorted(os.sched_getaffinity(0))  # before anything is pinned
GATEWAY_CORE, OTHER_CORE = USABLE[0], USABLE[-1]


def pin(pid: int, core: int) -> None:
    if len(USABLE) > 1:
        os.sched_setaffinity(pid, {core})


@contextmanager
def nodes(bench: Bench, url: str, **flags: Any) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Scripted nodes in a process of their own; its log is whole when the block has ended."""
    bundle = bench.folder / "bundle"
    bundle.write_bytes(bench.bundle)
    log = bench.folder / f"nodes-{time.monotonic_ns()}.json"
    command = [sys.executable, "-m", "benchmarks.scripted_nodes", "--url", url, "--token", TOKEN]
    command += ["--bundle", str(bundle), "--log", str(log), "--token-ids", str(bench.mark_id)]
    command += ["--core", str(OTHER_CORE)]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(command)
    try:
        yield process, log
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(10)


@dataclass
class Gateway:
    """A real `python -m gateway` process."""

    process: subprocess.Popen[str]
    port: int
    link_url: str

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        return int(kib) / 1024

    def wait_for_model(self, deadline_s: float = 60.0) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
        )
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            with urllib.request.urlopen(request, timeout=10) as answer:
                if json.load(answer)["data"]:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"no node was ready within {deadline_s:.0f} s")


@contextmanager
def gateway(bench: Bench) -> Iterator[Gateway]:
    home = Path(tempfile.mkdtemp(dir=bench.folder))
    token_file = home / "token"
    token_file.write_text(TOKEN)
    errors = (home / "stderr").open("w")
    command = [sys.executable, "-m", "gateway", "--home", str(home), "--api-key", KEY]
    command += ["--port", "0", "--link-port", "0", "--admin-port", "0"]
    command += ["--join-token-file", str(token_file)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ
        | {"KAGARI_ROUTING__MAX_IN_FLIGHT_PER_NODE": "1024", "KAGARI_SERVER__DRAIN_S": "1"},
    )
    pin(process.pid, GATEWAY_CORE)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            ready = json.loads(line)
            if ready.get("event") == "ready":
                port = int(ready["url"].rsplit(":", 1)[1])
                yield Gateway(process, port, ready["link_url"])
                break
        else:
            raise RuntimeError(f"the gateway did not start: {(home / 'stderr').read_text()}")
    finally:
        process.terminate()
        process.wait(15)
        errors.close()


# --- inside this process: text, routing, dispatch -------------------------------------------------


def local_fleet(bench: Bench, **config: Any) -> tuple[Fleet, Session]:
    """A fleet with one node in memory whose frames nobody reads."""
    bundles = Bundles(TextModel.load)
    digest = bundle_digest(bench.bundle)
    bundles.put(digest, bench.text)
    fleet = Fleet(bundles, FleetConfig(max_in_flight=1024, **config))
    session = fleet.attach(wire.Hello(1, 1, "local", 1, "mixed", (engine_info(bench, digest),)))
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
        step_tokens=512,
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
            burst = stream._flow.take()  # what `next` does once it is awake
            assert burst is not None
            sent += len(chunks.content(output.push(burst.tokens)))
    used = time.process_time() - began
    assert sent > 0
    for stream in streams:
        stream.abort()
    bench.add("own work per token", used / steps / 64 * 1e6, 4, 2, "µs")


SENTENCE = "The gateway turns text into tokens once, and every page of them has one name. "


def conversation(turns: int, chars: int) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        text = f"Turn {turn}: " + (SENTENCE * (chars // len(SENTENCE) + 1))[:chars]
        messages.append({"role": "user" if turn % 2 == 0 else "assistant", "content": text})
    return messages


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


# --- the link alone -------------------------------------------------------------------------------


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
            burst = await stream.next()
            if burst.end is not None:
                assert isinstance(burst.end, wire.Failed)
                return burst.end


# --- the whole gateway ----------------------------------------------------------------------------


def body(chars: int, max_tokens: int, *, stream: bool, turn: int = 0) -> bytes:
    messages = conversation(2, chars // 2)
    messages.append({"role": "user", "content": f"Question {turn}"})
    return json.dumps(
        {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream}
    ).encode()


def read_log(path: Path) -> Log:
    return msgspec.json.decode(path.read_bytes(), type=Log)


def streaming(bench: Bench, streams: int, rate: int) -> None:
    """All streams step together; a chunk's delay runs from its oldest token's frame to our read."""
    seconds = 4 if bench.quick else 15
    with gateway(bench) as served:
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
    with gateway(bench) as served:
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
    with gateway(bench) as served, nodes(bench, served.link_url):
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
    with gateway(bench) as served:
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
    with gateway(bench) as served:
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


# --- command --------------------------------------------------------------------------------------


def find_bundle(path: str | None) -> bytes:
    """The encoded bundle at path, else the default model's by its node's own command."""
    if path is not None:
        return Path(path).read_bytes()
    command = [sys.executable, "-m", "node_agent", "models", "spec", DEFAULT_MODEL, "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        sys.exit(
            f"no tokenizer: {' '.join(command[1:])} failed: {found.stderr.strip()[-300:]}\n"
            f"Run `kagari models pull {DEFAULT_MODEL}`, or give --bundle FILE."
        )
    return Path(json.loads(found.stdout)["bundle_path"]).read_bytes()


def show(rows: list[Row]) -> None:
    table = Table(title="gateway budgets: a ratio of 1 or more meets the must")
    for heading in ("what", "ours", "must", "good", "unit", "ratio", ""):
        table.add_column(heading, justify="left" if heading in ("what", "unit") else "right")
    for row in rows:
        is_good = row.ours >= row.good if row.more_is_better else row.ours <= row.good
        verdict = "good" if is_good else "met" if row.ratio >= 1 else "MISSED"
        figures = (f"{row.ours:.3g}", f"{row.must:g}", f"{row.good:g}")
        table.add_row(row.name, *figures, row.unit, f"{row.ratio:.2f}", verdict)
    console = Console()
    console.print(table)
    for name in ABSENT:
        console.print(f"not measured: {name}")


def as_json(rows: list[Row]) -> list[dict[str, object]]:
    made: list[dict[str, object]] = [
        {
            "name": row.name,
            "ours": row.ours,
            "peer": row.must,
            "peer_name": "must budget",
            "good": row.good,
            "unit": row.unit,
            "ratio": row.ratio,
        }
        for row in rows
    ]
    return made + [{"name": name, "absent": True} for name in ABSENT]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="shorter runs, under 2 minutes")
    flags.add_argument("--json", metavar="FILE", help="write the rows there")
    flags.add_argument("--bundle", metavar="FILE", help=f"tokenizer bundle ({DEFAULT_MODEL}'s)")
    flags.add_argument("--only", metavar="PART", help="only parts whose name contains this")
    options = flags.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    encoded = encode_bundle(
        replace(decode_bundle(find_bundle(options.bundle)), context_tokens=CONTEXT_TOKENS)
    )
    text = TextModel.load(decode_bundle(encoded))
    (mark_id,) = asyncio.run(text.raw_prompt(MARK.decode()))[-1:]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.quick, Path(folder), encoded, text, mark_id, [])
        parts = {
            "own work": lambda: own_work_per_token(bench),
            "parts 1 KB": lambda: uvloop.run(own_parts(bench, "1 KB", 1_000, 2, (80, 40))),
            "parts 8 KB": lambda: uvloop.run(own_parts(bench, "8 KB", 8_000, 8, (150, 70))),
            "parts 120 KB": lambda: uvloop.run(own_parts(bench, "120 KB", 120_000, 32, (500, 200))),
            "turn": lambda: uvloop.run(turn_of_32k(bench)),
            "frame in": lambda: uvloop.run(frame_in(bench)),
            "silent": lambda: uvloop.run(silent_node(bench)),
            "streaming 64": lambda: streaming(bench, 64, 200),
            "streaming 256": lambda: streaming(bench, 256, 200),
            "first token 64": lambda: first_token(bench, 64, 3, 2),
            "first token 256": lambda: first_token(bench, 256, 10, 6),
            "json": lambda: json_requests(bench),
            "close": lambda: close_to_abort(bench),
            "memory": lambda: memory(bench),
        }
        for what, core in (("gateway's", GATEWAY_CORE), ("nodes' and client's", OTHER_CORE)):
            p50, p99 = timer_lag_ms(core)
            print(f"machine: a 5 ms sleep on the {what} core ends {p50:.1f} ms late, p99 {p99:.1f}")
        whole_gateway_from = list(parts).index("streaming 64")
        for number, (name, part) in enumerate(parts.items()):
            if options.only is None or options.only in name:
                pin(os.getpid(), GATEWAY_CORE if number < whole_gateway_from else OTHER_CORE)
                part()
        show(bench.rows)
        if options.json:
            Path(options.json).write_text(json.dumps(as_json(bench.rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
