"""The engine as a process on a real socketpair, with the scripted runner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.framing import FrameReader, frame
from engine.process import EXIT_ENGINE_ERROR, Connection, run
from engine.schedule.plan import StepPlan, StepResult
from policies.contract import wire
from policies.contract.bundle import encode_bundle
from tests.engine.arena_runner import AheadArenaRunner
from tests.engine.engine_bench import BreakingRunner, EngineBench
from tests.engine.small_bundle import decode, encode, small_bundle

PATIENCE_S = 30.0  # with whatever is to come, on a machine that is busy
BUNDLE = small_bundle()
ROOT = Path(__file__).resolve().parents[2]
SPEC = {"name": "m", "identity": "m", "path": "none", "format": "gguf", "page_size": 16}
SCRIPT = [
    {"if": "die", "say": "abcdef", "die_after": 3},
    {"if": "slow", "say": "x" * 400, "delay_ms": 20},
    {"if": "pace", "say": "y" * 200, "delay_ms": 5},
    {"if": "hello", "say": "Hi, 篝!"},
]


class EngineProcess:
    def __init__(self, folder: Path, *flags: str) -> None:
        (folder / "script.json").write_text(json.dumps(SCRIPT))
        (folder / "bundle").write_bytes(encode_bundle(BUNDLE))
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE_S)
        command = [sys.executable, "-m", "engine", "serve", "--fd", str(theirs.fileno())]
        command += ["--model-spec", json.dumps(SPEC), "--engine-index", "0"]
        command += ["--script", str(folder / "script.json"), "--bundle", str(folder / "bundle")]
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *flags],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self.reader = FrameReader()
        self.frames: list[tuple[int, object]] = []
        self.taken = 0
        self.deadline = time.monotonic() + PATIENCE_S

    def send(self, channel: int, message: wire.AgentToEngine) -> None:
        self.socket.sendall(frame(channel, wire.encode(message)))

    def submit(self, channel: int, lane: int, text: str, **fields: object) -> None:
        ids = array("I", encode(BUNDLE, text))
        submit = wire.Submit(
            request_id=f"{channel}-{lane}-{text}",
            attempt=0,
            engine=0,
            lanes=(lane,),
            prompt=wire.pack_ids(ids),
            salt=bytes(32),
            sampling=wire.Sampling(500, stop_token_ids=BUNDLE.stop_token_ids),
            deadline_s=60.0,
        )
        self.send(channel, msgspec.structs.replace(submit, **fields))

    def next(self) -> tuple[int, object]:
        """The next frame; raises TimeoutError, or EOFError when the engine is gone."""
        if time.monotonic() > self.deadline:
            raise TimeoutError("news come, but not what the test waits for")
        while self.taken == len(self.frames):
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            for channel, message in self.reader.feed(data):
                decoder = wire.decode_from_node if channel else wire.decode_from_engine
                self.frames.append((channel, decoder(message)))
        self.taken += 1
        return self.frames[self.taken - 1]

    def up(self) -> wire.EngineUp:
        channel, message = self.next()
        assert channel == 0
        assert isinstance(message, wire.EngineUp)
        return message

    def read_lane(self, channel: int, lane: int) -> tuple[str, wire.Finished | wire.Failed]:
        ids: list[int] = []
        while True:
            at, message = self.next()
            if at != channel or not isinstance(message, wire.Step):
                continue
            pairs = zip(message.lanes, message.tokens, strict=True)
            ids += [token for other, token in pairs if other == lane]
            for rare in message.rare:
                if rare.lane == lane and not isinstance(rare, wire.Started):
                    return decode(BUNDLE, ids), rare

    def seen(self, kind: type) -> list:
        return [message for _, message in self.frames if isinstance(message, kind)]

    def stored(self) -> list[wire.PageEvent]:
        events = [event for news in self.seen(wire.EngineNews) for event in news.events]
        return [event for event in events if isinstance(event, wire.PageStored)]

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait(PATIENCE_S)
            assert self.process.stderr is not None
            self.process.stderr.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path)
    try:
        yield process
    finally:
        process.close()


def test_a_submit_comes_back_as_tokens_usage_and_page_events(engine: EngineProcess) -> None:
    up = engine.up()
    assert (up.info.model, up.info.context_tokens, up.info.page_size) == ("m", 4096, 16)
    engine.submit(5, 9, "hello " * 20)
    said, end = engine.read_lane(5, 9)
    assert said == "Hi, 篝!<|im_end|>"
    usage = wire.Usage(120, 0, len(encode(BUNDLE, "Hi, 篝!")) + 1)
    assert end == wire.Finished(9, "stop", usage)
    record = wire.UsageRecord("5-9-" + "hello " * 20, 0, 9, "stop", usage)
    assert engine.seen(wire.UsageRecord) == [record]  # in one piece with the end
    assert len(engine.stored()) == 8, "idle after work: told at once"
    engine.submit(6, 1, "hello " * 20)
    _, end = engine.read_lane(6, 1)
    assert end.usage.cached_tokens == 112


def test_a_fast_engine_says_so_and_its_pages_have_keys_of_their_own(tmp_path: Path) -> None:
    found = []
    for compute in ("exact", "fast"):
        engine = EngineProcess(tmp_path, "--compute", compute)
        try:
            info = engine.up().info
            assert info.compute == compute
            engine.submit(1, 1, "hello " * 20)
            engine.read_lane(1, 1)
            while len(engine.stored()) < 7:
                engine.next()
        finally:
            engine.close()
        found.append((info.identity, {event.page_key for event in engine.stored()}))
    (exact, exact_keys), (fast, fast_keys) = found
    assert (exact, fast) == ("m", "m+fast")
    assert not exact_keys & fast_keys


def test_an_exact_engine_that_takes_pages_of_fast_ones_promises_no_more_than_they(
    tmp_path: Path,
) -> None:
    engine = EngineProcess(tmp_path, "--announce", "fast")
    try:
        info = engine.up().info
        assert (info.compute, info.identity) == ("fast", "m+fast")
    finally:
        engine.close()


def test_news_come_each_second_when_idle(engine: EngineProcess) -> None:
    engine.up()
    engine.next()
    first_read = time.monotonic()
    for _ in range(2):
        _, news = engine.next()
        assert isinstance(news, wire.EngineNews)
        assert news.report.state == "ready"
    read = time.monotonic()
    assert read - engine.started_at > 1.9  # several may have waited for us, so from its start on
    assert read - first_read < 8.0


def test_a_message_nobody_knows_is_skipped_and_the_link_lives(engine: EngineProcess) -> None:
    engine.up()
    engine.socket.sendall(frame(1, msgspec.msgpack.encode(["new_in_version_9", 1])))
    engine.socket.sendall(frame(1, b"\xc1"))
    engine.submit(1, 1, "hello")
    assert engine.read_lane(1, 1)[0] == "Hi, 篝!<|im_end|>"


def test_an_abort_is_heard_between_two_tokens(engine: EngineProcess) -> None:
    engine.up()
    engine.submit(1, 1, "slow")
    while sum(len(step.tokens) for step in engine.seen(wire.Step)) < 4:
        engine.next()
    engine.taken = 0
    engine.send(1, wire.Abort((1,)))
    said, end = engine.read_lane(1, 1)
    assert isinstance(end, wire.Finished)
    assert end.reason == "abort"
    assert 3 < end.usage.completion_tokens == len(said) < 200


def test_die_after_kills_the_process_in_mid_stream(engine: EngineProcess) -> None:
    engine.up()
    engine.submit(1, 1, "die")
    with pytest.raises(EOFError):
        engine.read_lane(1, 1)
    steps = [message for _, message in engine.frames if isinstance(message, wire.Step)]
    assert decode(BUNDLE, [token for step in steps for token in step.tokens]) == "abc"
    assert engine.process.wait(PATIENCE_S) == 70


@pytest.mark.parametrize("busy", [False, True])
def test_the_agents_end_ends_the_engine_within_a_second(engine: EngineProcess, busy: bool) -> None:
    engine.up()
    if busy:
        engine.submit(1, 1, "slow")
    time.sleep(0.1)
    engine.socket.close()
    closed = time.monotonic()
    assert engine.process.wait(PATIENCE_S) == 0
    assert time.monotonic() - closed < 5.0  # it is a second where others leave it the cores


def test_sigterm_ends_the_engine(engine: EngineProcess) -> None:
    engine.up()
    os.kill(engine.process.pid, signal.SIGTERM)
    assert engine.process.wait(PATIENCE_S) == -signal.SIGTERM


def test_sixty_four_streams_keep_a_pace_of_200_tokens_a_second(engine: EngineProcess) -> None:
    engine.up()
    started = time.monotonic()
    for lane in range(64):
        engine.submit(1, lane, f"pace {lane}")
    ends = frames = 0
    while ends < 64:
        _, message = engine.next()
        if isinstance(message, wire.Step):
            frames += 1
            ends += sum(isinstance(rare, wire.Finished) for rare in message.rare)
    # 201 tokens at 5 ms are 1.0 s; the bound is loose because the machine is shared.
    assert 0.99 < time.monotonic() - started < 8.0
    assert frames < 1000


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--model-spec", "{"], 2, ["--model-spec"]),
        (["--model-spec", json.dumps({**SPEC, "page_size": 48})], 2, ["page_size", "power of two"]),
        (["--model-spec", json.dumps({**SPEC, "colour": 1})], 2, ["colour"]),
        (["--kv-device-tokens", "16"], 2, ["--kv-device-tokens", "16"]),
        (["--max-running", "600"], 2, ["--max-running", "600"]),
        (["--threads", "0"], 2, ["--threads"]),
        (["--compute", "quick"], 2, ["--compute", "quick", "exact or fast", "leave it out"]),
        (["--announce", "quick"], 2, ["--announce", "quick", "auto, fast", "leave it out"]),
        (["--compute", "fast", "--announce", "exact"], 2, ["--announce", "exact beside", "fast"]),
        (["--kv-dtype", "int4"], 2, ["--kv-dtype", "int4", "fp8, int8", "leave it out for bf16"]),
        (["--overlap", "maybe"], 2, ["--overlap", "maybe"]),
        (["--kv-host-mb", "-1"], 2, ["--kv-host-mb", "-1", "0 or more", "leave it out"]),
        (["--peer-port", "65536"], 2, ["--peer-port", "65536", "or none"]),
        (["--peer-host", "0.0.0.0"], 2, ["--peer-host", "0.0.0.0", "one address", "name it"]),
        (["--kv-disk-mb", "-5", "--kv-disk-dir", "d"], 2, ["--kv-disk-mb", "-5"]),
        (["--kv-disk-mb", "5"], 2, ["--kv-disk-dir", "nothing", "leave out --kv-disk-mb"]),
        (["--script", "/nowhere/script.json"], 4, ["--script", "nowhere"]),
        (["--bundle", "/nowhere/bundle"], 4, ["--bundle", "nowhere"]),
    ],
)
def test_a_wrong_flag_is_named(
    tmp_path: Path, flags: list[str], code: int, words: list[str]
) -> None:
    engine = EngineProcess(tmp_path, *flags)
    try:
        assert engine.process.wait(PATIENCE_S) == code
        assert engine.process.stderr is not None
        told = engine.process.stderr.read().decode()
        assert all(word in told for word in words), told
        assert "Traceback" not in told
    finally:
        engine.close()


def test_a_scripted_engine_says_that_it_has_no_slower_tiers(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path, "--kv-host-mb", "64")
    try:
        assert engine.up().info.tier_pages == ()
        engine.submit(1, 1, "hello")
        assert engine.read_lane(1, 1)[0] == "Hi, 篝!<|im_end|>"
        os.kill(engine.process.pid, signal.SIGKILL)
        assert engine.process.stderr is not None
        assert "no slower tiers" in engine.process.stderr.read().decode()
    finally:
        engine.close()


@pytest.mark.parametrize("overlap", ["", "eager", "lazy"])
def test_a_broken_runner_is_told_to_every_stream_and_ends_the_process(
    overlap: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineBench, "overlap", overlap)
    ours, theirs = socket.socketpair()
    bench = EngineBench(BreakingRunner(64, 4, lazy=overlap == "lazy"))
    exits: list[int] = []
    connection = Connection(ours, exit_process=exits.append)
    prompt = wire.pack_ids(array("I", range(10)))
    for lane in (1, 2):
        submit = wire.Submit(f"{lane}", 0, 2, (lane,), prompt, bytes(32), wire.Sampling(9), 60.0)
        theirs.sendall(frame(4, wire.encode(submit)))
    assert run(bench.engine, connection, time.monotonic) == EXIT_ENGINE_ERROR != 0
    bench.read(
        [
            (channel, message)
            for channel, message in FrameReader().feed(theirs.recv(1 << 20))
            if channel
        ]
    )
    assert bench.failures() == [(4, 1, "engine_error"), (4, 2, "engine_error")]
    assert "boom" in capfd.readouterr().err, "the operator finds the reason"
    theirs.close()
    deadline = time.monotonic() + PATIENCE_S
    while not exits and time.monotonic() < deadline:
        time.sleep(0.01)
    assert exits == [0]
    ours.close()


class LongStepRunner(AheadArenaRunner):
    """Its first step lasts until it is let go; then it breaks, which ends the loop."""

    def __init__(self) -> None:
        super().__init__(64, 4, lazy=True)
        self.let_go = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        if not self.let_go.wait(2 * PATIENCE_S):
            raise AssertionError("nobody let go")
        raise ArithmeticError("enough")


@pytest.mark.parametrize("overlap", ["", "lazy"])
def test_a_step_longer_than_the_news_interval_is_not_silence(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineBench, "overlap", overlap)
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    runner = LongStepRunner()
    bench = EngineBench(runner)
    bench.engine._clock = time.monotonic
    bench.submit(4, (1,))
    connection = Connection(ours, exit_process=lambda code: None)
    loop = threading.Thread(target=run, args=(bench.engine, connection, time.monotonic))
    loop.start()
    try:
        reader, ages = FrameReader(), []
        while len(ages) < 2:
            for _, data in reader.feed(theirs.recv(1 << 16)):
                news = wire.decode_from_engine(data)
                assert isinstance(news, wire.EngineNews)
                if not news.events:  # those are the loop's to tell, before and after the step
                    ages.append(news.report.step_age_s)
        assert 1.0 < ages[0] < ages[1]
    finally:
        runner.let_go.set()
        loop.join(PATIENCE_S)
    assert not loop.is_alive()
    theirs.close()
    connection._reader.join(PATIENCE_S)
    ours.close()


def test_an_agent_that_does_not_read_costs_bounded_memory() -> None:
    ours, theirs = socket.socketpair()
    exits: list[int] = []
    connection = Connection(ours, send_timeout_s=0.2, exit_process=exits.append)
    with pytest.raises(OSError, match="temporarily unavailable"):
        connection.send([(1, bytes(1 << 20))] * 32)
    theirs.close()
    deadline = time.monotonic() + 5.0
    while not exits and time.monotonic() < deadline:
        time.sleep(0.01)
    ours.close()
