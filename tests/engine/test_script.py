"""The scripted runner: which reply, when, and that only the prompt and the position decide."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest

from engine.config import ConfigError, ScheduleConfig
from engine.schedule.events import (
    PromptTold,
    SequenceFinished,
    SequenceStarted,
    TokensProduced,
)
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from engine.script import EXIT_DIED, ScriptRule, ScriptRunner, read_script
from policies.contract.wire import Sampling, TokenLogprob
from tests.engine.small_bundle import decode, encode, small_bundle

BUNDLE = small_bundle()
STOP = BUNDLE.stop_token_ids[0]


class Clock:
    def __init__(self) -> None:
        self.now = 50.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


class Died(Exception):
    pass


class Bench:
    def __init__(self, rules: list[ScriptRule], *, num_pages: int = 64, max_running: int = 8):
        self.clock = Clock()

        def die(code: int) -> None:
            raise Died(code)

        self.runner = ScriptRunner(
            tuple(rules), BUNDLE, clock=self.clock, sleep=self.clock.sleep, exit_process=die
        )
        self.scheduler = Scheduler(
            ScheduleConfig(
                num_pages=num_pages,
                page_size=16,
                context_tokens=1000,
                max_running=max_running,
            )
        )
        self.ids: dict[int, list[int]] = {}
        self.times: dict[int, list[float]] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self.steps = 0

    def submit(
        self, sequence_id: int, text: str, *, fork_of: int | None = None, **asked: int
    ) -> None:
        prompt = array("I", encode(BUNDLE, text))
        sampling = Sampling(500, stop_token_ids=BUNDLE.stop_token_ids, **asked)
        new = NewSequence(sequence_id, prompt, bytes(32), sampling, fork_of=fork_of)
        self.scheduler.submit(new, self.clock.now)
        self.runner.begin(sequence_id, prompt)

    def step(self) -> bool:
        plan = self.scheduler.plan(self.clock.now)
        if plan is None:
            return False
        self.steps += 1
        for event in self.scheduler.apply(self.runner.execute(plan), self.clock.now):
            match event:
                case PromptTold(sequence_id, _, entries):
                    self.prompt_logprobs.setdefault(sequence_id, []).extend(entries)
                case TokensProduced(sequence_id, tokens, logprobs):
                    self.logprobs.setdefault(sequence_id, []).extend(logprobs)
                    self.ids.setdefault(sequence_id, []).extend(tokens)
                    self.times.setdefault(sequence_id, []).append(self.clock.now)
                case SequenceStarted(sequence_id, cached_tokens):
                    self.cached[sequence_id] = cached_tokens
                case SequenceFinished(sequence_id):
                    self.runner.end(sequence_id)
        return True

    def drain(self) -> None:
        while self.step():
            pass

    def said(self, sequence_id: int) -> str:
        return decode(BUNDLE, self.ids[sequence_id])


def test_the_first_match_answers_and_the_stop_token_ends_it() -> None:
    bench = Bench([ScriptRule("Fran[ck]e", "Paris."), ScriptRule("France|Italy", "Rome, é 篝!")])
    bench.submit(1, "What is the capital of France?")
    bench.submit(2, "What is the capital of Italy?")
    bench.submit(3, "What?")
    bench.drain()
    assert bench.said(1) == "Paris.<|im_end|>"
    assert bench.said(2) == "Rome, é 篝!<|im_end|>"
    assert bench.said(3) == "…<|im_end|>"


def test_the_pattern_sees_the_whole_prompt_with_special_tokens_as_text() -> None:
    bench = Bench([ScriptRule(r"(?s)<\|im_start\|>user\n.*<\|im_end\|>$", "yes")])
    bench.submit(1, "<|im_start|>user\nhello\nyou<|im_end|>")
    bench.drain()
    assert bench.said(1) == "yes<|im_end|>"


def test_cached_tokens_are_the_real_schedulers() -> None:
    bench = Bench([ScriptRule("", "ok")])
    bench.submit(1, "x" * 100)
    bench.drain()
    bench.submit(2, "x" * 100)
    bench.drain()
    assert (bench.cached[1], bench.cached[2]) == (0, 96)


def test_lanes_of_one_prompt_all_say_it_at_its_pace() -> None:
    bench = Bench([ScriptRule("", "abc", delay_ms=20)])
    bench.submit(1, "x" * 40)
    for sequence_id in (2, 3):
        bench.submit(sequence_id, "x" * 40, fork_of=1)
    bench.drain()
    assert [bench.said(sequence_id) for sequence_id in (1, 2, 3)] == ["abc<|im_end|>"] * 3
    assert (bench.cached[2], bench.cached[3]) == (39, 39)
    assert max(bench.times[3]) - 50.0 < 0.2


def test_scripted_tokens_and_the_prompt_are_certain() -> None:
    bench = Bench([ScriptRule("", "ab", delay_ms=20)])
    bench.submit(1, "hello", logprobs=3, prompt_logprobs=0)
    bench.submit(2, "hello")
    bench.drain()
    assert bench.logprobs[1] == [TokenLogprob(0.0, 1, ((token, 0.0),)) for token in bench.ids[1]]
    assert bench.prompt_logprobs == {1: [TokenLogprob(0.0, 1)] * 4}
    assert bench.logprobs[2] == []


def test_a_preempted_reply_goes_on_where_it_was() -> None:
    say = "abcdefghijklmnopqrstuvwxyz" * 3
    bench = Bench([ScriptRule("", say)], num_pages=12)
    for sequence_id in (1, 2, 3):
        bench.submit(sequence_id, f"{sequence_id} hello")
    bench.drain()
    assert bench.scheduler.preemptions > 0
    assert all(bench.said(sequence_id) == say + "<|im_end|>" for sequence_id in (1, 2, 3))


def test_each_token_waits_its_delay_and_no_nap_is_longer_than_five_ms() -> None:
    bench = Bench([ScriptRule("", "abcd", delay_ms=20)])
    bench.submit(1, "hello")
    bench.drain()
    times = bench.times[1]
    assert 0.0195 <= times[0] - 50.0 <= 0.026
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(abs(gap - 0.020) < 0.002 for gap in gaps)
    assert max(bench.clock.naps) <= 0.005


def test_a_prompt_behind_a_slow_reply_starts_at_once() -> None:
    bench = Bench(
        [ScriptRule("slow", "abcd", delay_ms=60_000), ScriptRule("", "quick")], num_pages=128
    )
    bench.submit(1, "slow " + "x" * 500)
    for _ in range(3):
        bench.step()
    bench.submit(2, "y" * 500)
    while 2 not in bench.ids:
        bench.step()
    assert bench.clock.now - 50.0 < 0.1


def test_streams_of_one_pace_share_their_steps() -> None:
    bench = Bench([ScriptRule("", "x" * 40, delay_ms=5)], max_running=64, num_pages=512)
    for sequence_id in range(64):
        bench.submit(sequence_id, f"{sequence_id}")
        bench.clock.now += 0.0003
        bench.step()
    before = bench.steps
    bench.drain()
    assert bench.steps - before < 100, "64 streams × 41 tokens, not in 41 batches or so"
    assert all(len(ids) == 41 for ids in bench.ids.values())


def test_it_dies_after_so_many_tokens_and_not_before() -> None:
    bench = Bench([ScriptRule("", "abcdef", die_after=3)])
    bench.submit(1, "hello")
    with pytest.raises(Died) as died:
        bench.drain()
    assert died.value.args == (EXIT_DIED,)
    assert bench.said(1) == "abc"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (b"{", ["--script"]),
        (b'{"if": "a", "say": "b"}', ["array"]),
        (b'[{"if": "a"}]', ["say"]),
        (b'[{"say": "a"}]', ["if"]),
        (b'[{"if": "a", "say": "b", "delay": 3}]', ["delay"]),
        (b'[{"if": "a", "say": "b"}, {"if": "(", "say": "b"}]', ["[1].if", "regular expression"]),
        (b'[{"if": "a", "say": "b", "delay_ms": -1}]', ["[0].delay_ms", "-1"]),
        (b'[{"if": "a", "say": "b", "die_after": -1}]', ["[0].die_after"]),
        (b'[{"if": "a", "say": 5}]', ["say"]),
        (b"\xff\xfe", ["--script"]),
    ],
)
def test_a_wrong_script_names_the_field(script: bytes, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_script(script)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_script_as_users_write_it() -> None:
    (rule,) = read_script('[{"if": "(?i)paris", "say": "é", "delay_ms": 5}]'.encode())
    assert rule == ScriptRule("(?i)paris", "é", 5.0)
