"""The engine: messages in, steps of the scheduler and its runner, frames of tokens out.

    handle(channel, message)     Submit → sequences, one a lane; Abort, FinishLane, Pin, Purge …
    step() → frames              movers' news → expire → a step (stepper.py) → one Step a channel

Nothing here waits or does I/O: process.py brings the messages and carries the frames.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from engine.framing import AGENT_CHANNEL
from engine.memory import rss_bytes
from engine.pins import Pins
from engine.purges import Purges
from engine.schedule.events import (
    PromptAdvanced,
    PromptTold,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRefused,
    SequenceStarted,
    TokensProduced,
)
from engine.schedule.plan import Runner
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from engine.schedule.transfer_orders import Mover
from engine.stepper import Stepper
from engine.store.tiered import TieredStore
from engine.submit import check_pin, check_submit
from policies.contract import page_keys, wire

Frame = tuple[int, bytes]  # (channel, encoded message)

_REMEMBERED_SUBMITS = 8192
_SEEDS = 1 << 63
_CLOSE_POLL_S = 0.005
_CLOSE_TIERS_S = 0.5  # then a tier or a peer that hangs is left behind


@dataclass(frozen=True, slots=True)
class _Stream:
    """Where a sequence's tokens go, and whose usage it is."""

    channel: int
    lane: int
    request_id: str
    attempt: int


class Engine:
    """One model's sequences on one scheduler and one runner; single-threaded."""

    def __init__(
        self,
        info: wire.EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        clock: Callable[[], float],
        overlap: bool = False,
        store: TieredStore | None = None,
        lost_tiers: tuple[wire.Tier, ...] = (),
        mover: Mover | None = None,
    ) -> None:
        """store: carries out what the scheduler orders of its slower tiers. lost_tiers: asked for,
        but they could not be opened: reported as broken. mover: the same, of other engines; None:
        it takes no part in splits."""
        self.info = info
        self.scheduler = scheduler
        self.advanced = False  # the last step() computed something
        self._runner = runner
        self._stepper = Stepper(
            scheduler, runner, overlap=overlap, clock=clock, planned=self._give_orders
        )
        self._vocab_size = vocab_size
        self._clock = clock
        self._advanced_at = clock()
        self._report: wire.EngineReport | None = None  # the last one told
        self._draining = False
        self._sequence_ids = itertools.count(1)
        self._streams: dict[int, _Stream] = {}  # by sequence id
        self._sequence_by_lane: dict[tuple[int, int], int] = {}
        self._submits: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._steps: dict[int, wire.Step] = {}  # by channel: what the next frames carry
        self._records: list[wire.UsageRecord] = []
        self._store = store
        self._lost_tiers = lost_tiers
        self._mover = mover
        self._pins = Pins(scheduler, info, begin=runner.begin, end=runner.end)
        self._purges = Purges(scheduler, info.engine)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._stepper.is_computing

    # --- messages in ----------------------------------------------------------------------------

    def handle(self, channel: int, message: wire.AgentToEngine) -> None:
        """Take one message of a link (or of the agent); answers come with the next step()."""
        now = self._clock()
        match message:
            case wire.Submit():
                self._submit(channel, message, now)
            case wire.Abort(lanes=()):
                for lane in [lane for at, lane in self._sequence_by_lane if at == channel]:
                    self._abort(channel, lane, now)
            case wire.Abort():
                for lane in message.lanes:
                    self._abort(channel, lane, now)
            case wire.FinishLane():
                sequence_id = self._sequence_by_lane.get((channel, message.lane))
                if sequence_id is not None:  # else: it ended while the message travelled
                    self._route(self.scheduler.finish(sequence_id, message.keep, now))
            case wire.Drain():
                self._draining = message.drain
                if message.drain:
                    self.scheduler.tiers.demote(now)
            case wire.Pin():
                self._pin(channel, message, now)
            case wire.Unpin():
                self._route(self._pins.unpin(message.pin_id, now))
            case wire.Purge():
                self._route(self._pins.unpin_owner(page_keys.owner_tag(message.salt), now))
                self._purges.begin(channel, message, now)
            case wire.Quotas():
                self.scheduler.set_quotas(dict(message.shares))
            case _:
                assert_never(message)

    def _submit(self, channel: int, submit: wire.Submit, now: float) -> None:
        attempt = (submit.request_id, submit.attempt)
        if attempt in self._submits:
            return
        self._submits[attempt] = None
        if len(self._submits) > _REMEMBERED_SUBMITS:
            self._submits.popitem(last=False)
        try:
            checked: tuple[array[int], wire.Transfer | None] | SequenceRefused = check_submit(
                submit, self._vocab_size, draining=self._draining, moves=self._mover is not None
            )
        except SequenceRefused as refused:
            checked = refused
        leader: int | None = None  # the lane that computes the prompt; the later ones fork from it
        for index, lane in enumerate(submit.lanes):
            stream = _Stream(channel, lane, submit.request_id, submit.attempt)
            if (channel, lane) in self._sequence_by_lane:
                # Whose tokens would they be? Neither stream can be trusted from here on.
                self._abort(channel, lane, now)
                self._refuse(stream, "lane_in_use", f"lane: found {lane} busy, allowed a free one")
                continue
            try:
                if isinstance(checked, SequenceRefused):
                    raise checked
                new = self._new_sequence(submit, index, *checked, leader, now)
                self.scheduler.submit(new, now)
            except SequenceRefused as refused:
                self._refuse(stream, refused.code, refused.message)
                continue
            self._streams[new.sequence_id] = stream
            self._sequence_by_lane[channel, lane] = new.sequence_id
            self._runner.begin(new.sequence_id, new.prompt)
            leader = leader or new.sequence_id

    def _pin(self, channel: int, pin: wire.Pin, now: float) -> None:
        try:
            prompt = check_pin(pin, self._vocab_size, draining=self._draining)
            self._pins.pin(channel, pin, prompt, next(self._sequence_ids), now)
        except SequenceRefused as refused:
            self._pins.refuse(channel, pin.pin_id, refused.code, refused.message)

    def _new_sequence(
        self,
        submit: wire.Submit,
        index: int,
        prompt: array[int],
        transfer: wire.Transfer | None,
        leader: int | None,
        now: float,
    ) -> NewSequence:
        root = page_keys.seed(
            identity=self.info.identity,
            tokenizer_digest=self.info.tokenizer_digest,
            page_size=self.info.page_size,
            salt=submit.salt,
        )
        sampling = submit.sampling
        if index:  # lanes of one request differ only by their noise; the first tells the prompt
            seed = (sampling.seed + index) % _SEEDS
            sampling = msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)
        return NewSequence(
            next(self._sequence_ids),
            prompt,
            root,
            sampling,
            now + submit.deadline_s,
            leader,
            owner=page_keys.owner_tag(submit.salt),
            retention_s=submit.retention_s or 0.0,
            role=submit.role,
            transfer=transfer,
        )

    def _abort(self, channel: int, lane: int, now: float) -> None:
        sequence_id = self._sequence_by_lane.get((channel, lane))
        if sequence_id is not None:  # else: it ended while the message travelled
            self._route(self.scheduler.abort(sequence_id, now))

    # --- steps ----------------------------------------------------------------------------------

    def step(self) -> list[Frame]:
        """Compute one step if there is work; returns all that is to be sent.

        Whatever the runner raises passes through: call fail() then, send its frames, and end.
        """
        now = self._clock()
        self._move(now)
        self._route(self.scheduler.expire(now))
        self._route(self._pins.expire(now))
        events = self._stepper.step()
        self.advanced = events is not None
        if events is not None:
            self._advanced_at = self._clock()
            self._route(events)
        elif not self.has_work:
            self._advanced_at = now
        self._give_orders()
        return self._take_frames()

    def _move(self, now: float) -> None:
        """Take what slower tiers and other engines did, and let them begin what was asked of them
        meanwhile."""
        if self._store is not None:
            for news in self._store.take():
                self.scheduler.tiers.take(news, now)
                self._purges.take(news)
        if self._mover is not None:
            for told in self._mover.take():
                self._route(self.scheduler.take(told, now))
        self._give_orders()

    def _give_orders(self) -> None:
        scheduler = self.scheduler
        if self._store is not None and scheduler.tiers.has_orders:
            self._store.give(scheduler.tiers.take_orders())
        if self._mover is not None and scheduler.transfers.has_orders:
            self._mover.give(scheduler.transfers.take_orders())

    def close(self, within_s: float = 0.0) -> None:
        """Let the step under way come to its end, and what is in no lasting tier go into one, as
        far as there is time; call it last."""
        self._stepper.close()
        until = self._clock() + within_s
        self.scheduler.fail_all("draining", "engine: found its agent gone; it ends")
        if self._store is not None and within_s > 0:
            self.scheduler.tiers.demote(self._clock())
        self._move(self._clock())
        while self.scheduler.tiers.is_demoting and self._clock() < until:
            time.sleep(_CLOSE_POLL_S)
            self._move(self._clock())
        if self._mover is not None:
            self._mover.close(_CLOSE_TIERS_S)
        if self._store is not None:
            self._store.close(_CLOSE_TIERS_S)

    def fail(self, code: str, message: str) -> list[Frame]:
        """End every sequence with this error."""
        self._route(self.scheduler.fail_all(code, message))
        return self._take_frames()

    def news(self) -> Frame:
        """Load and page events since the last news, for the agent."""
        load = self.scheduler.load()
        first_event, events = self.scheduler.take_page_events()
        report = wire.EngineReport(
            engine=self.info.engine,
            state="ready",
            step=self.scheduler.step,
            step_age_s=self._clock() - self._advanced_at,
            waiting_sequences=load.waiting_sequences,
            running_sequences=load.running_sequences,
            uncached_tokens=load.uncached_tokens,
            pages_total=load.pages_total,
            pages_free=load.pages_free,
            pages_held=load.pages_held,
            pages_cached=load.pages_cached,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_tokens_per_s=load.decode_tokens_per_s,
            preemptions=load.preemptions,
            rss_bytes=rss_bytes(),
            tiers=self._tier_reports(),
            pages_pinned=load.pages_pinned,
            integrity_faults=load.integrity_faults,
            charged_pages=load.charged_pages,
            quota_breaches=load.quota_breaches,
            import_bytes_per_s=self.scheduler.transfers.import_rate.bytes_per_s,
        )
        self._report = report
        return AGENT_CHANNEL, wire.encode(wire.EngineNews(report, first_event, events))

    def _tier_reports(self) -> tuple[wire.TierReport, ...]:
        states = {} if self._store is None else self._store.states()
        lost = (wire.TierReport(tier, 0, 0, "broken") for tier in self._lost_tiers)
        return (*self.scheduler.tiers.report(states), *lost)

    def pulse(self) -> list[Frame]:
        """The last report with the age of the step that runs; safe from another thread."""
        if self._report is None:
            return []
        age_s = self._clock() - self._advanced_at
        report = msgspec.structs.replace(self._report, step_age_s=age_s)
        return [(AGENT_CHANNEL, wire.encode(wire.EngineNews(report, 0, [])))]

    # --- events out -----------------------------------------------------------------------------

    def _route(self, events: Iterable[SequenceEvent]) -> None:
        for event in events:
            if self._pins.owns(event.sequence_id):
                self._pins.take(event)
                continue
            stream = self._streams[event.sequence_id]
            step = self._step_of(stream.channel)
            match event:
                case TokensProduced(tokens=tokens, logprobs=logprobs):
                    for token in tokens:
                        step.lanes.append(stream.lane)
                        step.tokens.append(token)
                    if logprobs:
                        step.rare.append(wire.Logprobs(stream.lane, logprobs))
                case PromptAdvanced(num_computed=num_computed):
                    step.computed.append((stream.lane, num_computed))
                case PromptTold(start=start, entries=entries):
                    step.rare.append(wire.PromptLogprobs(stream.lane, start, entries))
                case SequenceStarted():
                    step.rare.append(
                        wire.Started(
                            stream.lane,
                            event.cached_tokens,
                            event.queue_s,
                            event.tier,
                            *event.slower_tokens,
                        )
                    )
                case SequenceFinished(reason=reason, usage=usage):
                    step.rare.append(wire.Finished(stream.lane, reason, usage))
                    self._end(event.sequence_id, stream, reason, usage)
                case SequenceFailed(code=code, message=message, usage=usage):
                    step.rare.append(wire.Failed(stream.lane, code, message, usage))
                    self._end(event.sequence_id, stream, "error", usage)
                case _:
                    assert_never(event)

    def _end(
        self, sequence_id: int, stream: _Stream, reason: wire.FinishReason, usage: wire.Usage
    ) -> None:
        del self._streams[sequence_id], self._sequence_by_lane[stream.channel, stream.lane]
        self._runner.end(sequence_id)
        self._record(stream, reason, usage)

    def _refuse(self, stream: _Stream, code: str, message: str) -> None:
        usage = wire.Usage()
        step = self._step_of(stream.channel)
        step.rare.append(wire.Failed(stream.lane, code, message, usage))
        self._record(stream, "error", usage)

    def _record(self, stream: _Stream, reason: wire.FinishReason, usage: wire.Usage) -> None:
        self._records.append(
            wire.UsageRecord(stream.request_id, stream.attempt, stream.lane, reason, usage)
        )

    def _step_of(self, channel: int) -> wire.Step:
        step = self._steps.get(channel)
        if step is None:
            step = self._steps[channel] = wire.Step(self.info.engine, 0, [], [], [], [])
        return step

    def _take_frames(self) -> list[Frame]:
        frames: list[Frame] = []
        for channel, step in self._steps.items():
            step.step = self.scheduler.step
            frames.append((channel, wire.encode(step)))
        frames += [(AGENT_CHANNEL, wire.encode(record)) for record in self._records]
        self._steps, self._records = {}, []
        results = [*self._pins.take_results(), *self._purges.take_results(self._clock())]
        frames += [(channel, wire.encode(result)) for channel, result in results]
        return frames
