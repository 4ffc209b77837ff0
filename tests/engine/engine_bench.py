"""An engine on an ArenaRunner, stepped by hand, its frames read back per channel and lane."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from engine.config import ScheduleConfig
from engine.engine import Engine, Frame
from engine.schedule.plan import StepPlan, StepResult
from engine.schedule.scheduler import Scheduler
from policies.contract import wire
from policies.contract.wire import Sampling, Submit, pack_ids
from tests.engine.arena_runner import VOCAB, AheadArenaRunner, ArenaRunner

SALT = bytes(32)
PROMPT = array("I", range(10))


def engine_info(num_pages: int = 64) -> wire.EngineInfo:
    return wire.EngineInfo(
        engine=2,
        model="m",
        identity="m",
        context_tokens=200,
        page_size=4,
        num_pages=num_pages,
        bundle_digest="",
        tokenizer_digest="",
        layout_id="l",
        weights_digest="w",
        weights_precision="fp32",
        kv_precision="fp32",
        compute="exact",
        step_tokens=32,
    )


class EngineBench:
    overlap = ""  # or eager, lazy: see AheadArenaRunner; a test module may set it for its tests

    def __init__(self, runner: Any = None, *, vocab_size: int = VOCAB, **limits: int) -> None:
        defaults = {"num_pages": 64, "page_size": 4, "context_tokens": 200, "step_tokens": 32}
        config = ScheduleConfig(**{**defaults, "max_running": 8, "max_waiting": 100, **limits})
        self.now = 10.0
        self.results: list[wire.PinResult | wire.PurgeResult] = []
        if runner is None and self.overlap:
            runner = AheadArenaRunner(64, 4, lazy=self.overlap == "lazy")
        self.runner = runner or ArenaRunner(64, 4)
        self.engine = Engine(
            engine_info(),
            Scheduler(config),
            self.runner,
            vocab_size=vocab_size,
            clock=lambda: self.now,
            overlap=bool(self.overlap),
        )
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.rare: list[tuple[int, wire.Rare]] = []
        self.records: list[wire.UsageRecord] = []

    def submit(
        self, channel: int, lanes: tuple[int, ...], *, request_id: str = "", **fields: object
    ) -> None:
        submit = Submit(
            request_id=request_id or f"r{channel}-{lanes}",
            attempt=0,
            engine=2,
            lanes=lanes,
            prompt=pack_ids(PROMPT),
            salt=SALT,
            sampling=Sampling(6, temperature=0.0),
            deadline_s=60.0,
        )
        self.engine.handle(channel, msgspec.structs.replace(submit, **fields))

    def step(self) -> list[Frame]:
        frames = self.engine.step()
        self.read(frames)
        return frames

    def read(self, frames: list[Frame]) -> None:
        for channel, data in frames:
            if channel == 0:
                record = wire.decode_from_engine(data)
                assert isinstance(record, wire.UsageRecord)
                self.records.append(record)
                continue
            step = wire.decode_from_node(data)
            if isinstance(step, wire.PinResult | wire.PurgeResult):
                self.results.append(step)
                continue
            assert isinstance(step, wire.Step)
            assert step.engine == 2
            for lane, token in zip(step.lanes, step.tokens, strict=True):
                self.tokens.setdefault((channel, lane), []).append(token)
            self.rare += [(channel, rare) for rare in step.rare]

    def drain(self) -> None:
        for _ in range(2000):
            self.step()
            if not self.engine.has_work:
                return
        raise AssertionError("it never ended")

    def logprobs(self, channel: int, lane: int) -> list[wire.TokenLogprob]:
        return [
            entry
            for at, rare in self.rare
            if at == channel and isinstance(rare, wire.Logprobs) and rare.lane == lane
            for entry in rare.entries
        ]

    def failures(self) -> list[tuple[int, int, str]]:
        return [
            (channel, rare.lane, rare.code)
            for channel, rare in self.rare
            if isinstance(rare, wire.Failed)
        ]


class BreakingRunner(AheadArenaRunner):
    """Breaks in its third step: at the launch, or if lazy, when the result is collected."""

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == 3:
            raise ArithmeticError("boom")
        return super().execute(plan)
