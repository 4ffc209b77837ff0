"""Two engines in one process with real movers over loopback, and what a gateway sends them."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.config import ScheduleConfig, TierConfig
from engine.engine import Engine
from engine.framing import AGENT_CHANNEL
from engine.schedule.plan import Runner
from engine.schedule.scheduler import Scheduler
from engine.store.guard import Guard
from engine.store.page_codec import PageLayout
from engine.store.tier import Tier
from engine.store.tiered import PageMemory, TieredStore
from engine.transfer.mover import TransferMover
from policies.contract import wire
from policies.contract.wire import Role, Sampling, Submit, Transfer, pack_ids
from tests.engine.engine_bench import SALT, engine_info

CHANNEL = 1


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    started: wire.Started | None = None
    end: wire.Finished | wire.Failed | None = None
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)


class EngineSite:
    """One engine with its mover; what it says, by lane."""

    def __init__(
        self,
        runner: Runner,
        memory: PageMemory,
        layout: PageLayout,
        *,
        vocab_size: int,
        overlap: bool = False,
        tiers: Sequence[Tier] = (),
        **limits: int,
    ) -> None:
        """tiers: fastest first."""
        defaults = {"context_tokens": 200, "step_tokens": 32, "max_running": 8}
        config = ScheduleConfig(
            **{"page_size": layout.page_size, "vocab_size": vocab_size, **defaults, **limits},
            page_bytes=layout.page_bytes,
            tiers=tuple(
                TierConfig(name=tier.name, capacity_pages=tier.capacity_pages) for tier in tiers
            ),
        )
        store = TieredStore([Guard(tier) for tier in tiers], memory) if tiers else None
        self.mover = TransferMover(memory, layout, listen=("127.0.0.1", 0))
        self.runner: Any = runner
        self.scheduler = Scheduler(config)
        info = msgspec.structs.replace(
            engine_info(config.num_pages), page_size=config.page_size, peer=self.mover.address
        )
        self.engine = Engine(
            info,
            self.scheduler,
            runner,
            vocab_size=vocab_size,
            clock=time.monotonic,
            overlap=overlap,
            store=store,
            mover=self.mover,
        )
        self.answers: dict[int, Answer] = {}
        self.records: list[wire.UsageRecord] = []

    def step(self) -> bool:
        """Whether anything was computed or said."""
        frames = self.engine.step()
        for channel, data in frames:
            if channel == AGENT_CHANNEL:
                record = wire.decode_from_engine(data)
                assert isinstance(record, wire.UsageRecord)
                self.records.append(record)
                continue
            step = wire.decode_from_node(data)
            if isinstance(step, wire.PurgeResult):
                continue
            assert isinstance(step, wire.Step)
            for lane, token in zip(step.lanes, step.tokens, strict=True):
                self.answers[lane].tokens.append(token)
            for rare in step.rare:
                answer = self.answers[rare.lane]
                match rare:
                    case wire.Started():
                        answer.started = rare
                    case wire.Logprobs():
                        answer.logprobs += rare.entries
                    case wire.Finished() | wire.Failed():
                        assert answer.end is None
                        answer.end = rare
        return bool(frames) or self.engine.advanced

    def close(self) -> None:
        self.engine.close()


class EnginePair:
    def __init__(self, prefill: EngineSite, decode: EngineSite) -> None:
        self.prefill, self.decode = prefill, decode
        self._lanes = 0

    @property
    def sites(self) -> Sequence[EngineSite]:
        return self.prefill, self.decode

    def send(
        self, site: EngineSite, prompt: array[int], sampling: Sampling, **fields: object
    ) -> Answer:
        """One leg, or a whole request."""
        self._lanes += 1
        answer = site.answers[self._lanes] = Answer()
        submit = Submit(
            request_id=f"r{self._lanes}",
            attempt=0,
            engine=2,
            lanes=(self._lanes,),
            prompt=pack_ids(prompt),
            salt=SALT,
            sampling=sampling,
            deadline_s=60.0,
        )
        site.engine.handle(CHANNEL, msgspec.structs.replace(submit, **fields))
        return answer

    def split(
        self, prompt: array[int], sampling: Sampling, *, returns: bool = False, **fields: object
    ) -> tuple[Answer, Answer]:
        """What prefill and decode say of one request."""
        home = (os.urandom(16), os.urandom(32)) if returns else (b"", b"")
        ids = os.urandom(16), os.urandom(32)
        legs: list[tuple[EngineSite, Role, EngineSite]] = [
            (self.decode, "decode", self.prefill),
            (self.prefill, "prefill", self.decode),
        ]
        answers = [
            self.send(
                site,
                prompt,
                sampling,
                role=role,
                transfer=wire.encode(Transfer(*ids, other.engine.info.peer, *home)),
                **fields,
            )
            for site, role, other in legs
        ]
        return answers[1], answers[0]

    def settle(self, within_s: float = 20.0) -> None:
        """Until every sequence and every transfer is over."""
        until = time.monotonic() + within_s
        while any(
            site.engine.has_work
            or not site.scheduler.transfers.is_idle
            or not site.scheduler.tiers.is_idle
            for site in self.sites
        ):
            assert time.monotonic() < until, "it never came to rest"
            if not any([site.step() for site in self.sites]):
                time.sleep(0.0005)
        for site in self.sites:
            site.scheduler.invariants()
            assert site.scheduler.pool.num_held == 0

    def close(self) -> None:
        for site in self.sites:
            site.close()
