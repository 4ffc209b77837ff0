"""An engine on an ArenaRunner with real slower tiers, their threads and their guards."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

from engine.config import ScheduleConfig, TierConfig
from engine.engine import Engine
from engine.execute.page_memory import page_memory
from engine.execute.runner import ModelRunner
from engine.schedule.rates import Rates
from engine.schedule.scheduler import Scheduler
from engine.store.guard import Guard
from engine.store.page_codec import PageLayout
from engine.store.shared_host import SharedHostTier
from engine.store.tier import Tier
from engine.store.tiered import PageMemory, TieredStore
from tests.engine.arena_runner import VOCAB, ArenaRunner
from tests.engine.engine_bench import EngineBench, engine_info

PAGE_SIZE = 4
LAYOUT = PageLayout("fp32", num_layers=1, num_kv_heads=1, page_size=PAGE_SIZE, head_dim=1)
_STATES = struct.Struct(f"<{PAGE_SIZE}q")
assert LAYOUT.page_bytes == _STATES.size


class ArenaBytes:
    """A PageMemory: the states of an ArenaRunner's pages as bytes, staged as for a GPU."""

    page_bytes = LAYOUT.page_bytes

    def __init__(self, runner: ArenaRunner) -> None:
        self.runner = runner
        self.lent = 0

    def generation(self, page_id: int) -> int:
        return self.runner.tags[page_id]

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        for page, generation in assigned:
            self.runner.tags[page] = generation

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview]:
        views = self.incoming(page_ids)
        for page, view in zip(page_ids, views, strict=True):
            _STATES.pack_into(view, 0, *self.runner.arena[page])
        return views

    def incoming(self, page_ids: Sequence[int]) -> list[memoryview]:
        self.lent += len(page_ids)
        return [memoryview(bytearray(self.page_bytes)) for _ in page_ids]

    def arrive(self, page_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        for page, view in zip(page_ids, views, strict=True):
            self.runner.arena[page] = list(_STATES.unpack(view))

    def free(self, views: Sequence[memoryview]) -> None:
        self.lent -= len(views)


class SlowRates(Rates):
    """A model so slow that a fetch is always worth it."""

    def record(self, *, prefill_tokens: int, decode_tokens: int, step_s: float) -> None:
        pass


class TieredBench(EngineBench):
    """tiers: fastest first; each gets a guard of its own, that never gives up if patient. model: a
    real one in the place of an ArenaRunner, with all of its pages."""

    def __init__(
        self,
        *tiers: Tier,
        num_pages: int = 24,
        context_tokens: int = 80,
        patient: bool = False,
        model: ModelRunner | None = None,
    ) -> None:
        super().__init__()
        page_size, page_bytes, vocab_size = PAGE_SIZE, LAYOUT.page_bytes, VOCAB
        if model is None:
            self.runner = ArenaRunner(num_pages, PAGE_SIZE)
            self.memory: PageMemory = ArenaBytes(self.runner)
        else:
            self.runner, self.memory = model, page_memory(model.arena)
            num_pages, page_size = model.arena.num_pages, model.arena.layout.page_size
            page_bytes, vocab_size = model.page_bytes, model.vocab_size
        config = ScheduleConfig(
            num_pages=num_pages,
            page_size=page_size,
            context_tokens=context_tokens,
            step_tokens=32,
            max_running=4,
            tiers=tuple(
                TierConfig(name=tier.name, capacity_pages=tier.capacity_pages) for tier in tiers
            ),
            page_bytes=page_bytes,
        )
        self.scheduler = Scheduler(config)
        self.scheduler.rates = SlowRates(1e-3, config.step_tokens)
        for tier in tiers:
            if isinstance(tier, SharedHostTier):
                self.scheduler.tiers.share("host", tier.peek)
            else:
                self.scheduler.tiers.load(tier.name, tier.records(), time.monotonic())
        failures = 10**9 if patient else 3
        guards = [Guard(tier, failures_to_open=failures, pause_s=0.05) for tier in tiers]
        self.store = TieredStore(guards, self.memory)
        self.engine = Engine(
            engine_info(num_pages),
            self.scheduler,
            self.runner,
            vocab_size=vocab_size,
            clock=time.monotonic,
            store=self.store,
        )

    def settle(self, within_s: float = 10.0) -> None:
        """Until every sequence and every order is over."""
        until = time.monotonic() + within_s
        while self.engine.has_work or not self.scheduler.tiers.is_idle:
            assert time.monotonic() < until, "it never came to rest"
            self.step()
            if not self.engine.advanced:
                time.sleep(0.0005)
        self.scheduler.invariants()
        assert self.scheduler.pool.num_held == 0

    def evict_all(self) -> None:
        while self.scheduler.cache.evict(time.monotonic()):
            pass
