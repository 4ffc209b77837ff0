"""Decides every step: which sequences run, on which pages, and who must wait. No torch, no I/O.

One counter, no phases: a step gives each running sequence some of the tokens that num_computed
still lacks. Rows of one token (decoding) come first; what is left of the token budget goes to
prompts, shortest uncached first, where waiting counts as work done at the measured rate, so that
the order is kind to short prompts and a long one still cannot starve.

A fork waits until its leader has computed their prompt, then holds the leader's full pages, gets
a copy of the page that the prompt ends in, and computes the prompt's last token for itself: that
gives it logits of its own. Where the leader is gone it goes the ordinary way, by a prefix hit.

While a step is in flight the next one can be planned if it only decodes on: who follows whom is
known, the tokens are not. What the step in flight then ends has a row too many in the next one,
whose result nobody takes; a step hold keeps its pages until then.

What slower tiers hold of a prompt is ordered when the prompt is queued (awaited.py); the sequence
is admitted once it is there, by a prefix hit like any other, and others go on meanwhile.

A prompt may be computed by one engine and decoded by another (transfers.py). Where it is computed
it is a prompt like others up to its first token, which is not its own to tell. Where it is decoded
it takes its turn for pages like others, computes nothing, and runs once they are written. Before
that it waits for what slower tiers or another prompt's transfer bring of it, which need not come
twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.config import ScheduleConfig
from engine.schedule.awaited import Awaited
from engine.schedule.events import (
    Load,
    PromptAdvanced,
    PromptTold,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRefused,
    SequenceStarted,
    TokensProduced,
)
from engine.schedule.outcomes import Grown, Lost, Returned, Sent, TakenOver
from engine.schedule.page_events import PageEventLog
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.plan import PageCopy, Row, StepPlan, StepResult
from engine.schedule.prefix_cache import PrefixCache
from engine.schedule.rates import Rates
from engine.schedule.sequence import NewSequence, Sequence, State
from engine.schedule.shelf import Chain
from engine.schedule.tiers import SlowerTiers
from engine.schedule.transfer_orders import Handover, TransferNews
from engine.schedule.transfers import Transfers
from policies.contract.wire import FinishReason, PageEvent, TokenLogprob
from policies.tiering import quota_pages


@dataclass(slots=True)
class _Draft:
    """A step while it is being filled."""

    budget: int
    now: float
    preempted: set[int]  # not admitted again in the same step
    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    assigned: list[tuple[int, int]] = field(default_factory=list)
    zero_tails: list[tuple[int, int]] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    computing: set[bytes] = field(default_factory=set)  # keys of pages that this step writes


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    sequences: list[Sequence]
    planned_at: float


class Scheduler:
    """plan → (a runner executes, plan_ahead) → apply; submit · abort · finish · expire any time."""

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.page_events = PageEventLog(("device", *(tier.name for tier in config.tiers)))
        self.cache = PrefixCache(self.pool, self.page_events)
        self.tiers = SlowerTiers(config, self.pool, self.cache, self.page_events)
        self.transfers = Transfers(config, self.pool, self.cache, spare=self._spare_pages)
        self.rates = Rates(config.prefill_tokens_per_s, config.step_tokens)
        self._awaited = Awaited(
            config, self.cache, self.tiers, self.transfers, self.rates, spare=self._spare_pages
        )
        self.step = 0
        self.preemptions = 0
        self.integrity_faults = 0
        self._pool_tokens = config.num_pages * config.page_size
        self._max_tokens = min(config.context_tokens, self._pool_tokens)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # in order of admission; others are moving
        self._in_flight: list[_InFlight] = []  # at most two, the second planned ahead
        self._step_holds: dict[int, list[PageId]] = {}

    # --- between steps --------------------------------------------------------------------------

    def submit(self, new: NewSequence, now: float) -> None:
        """Let a sequence wait for its first step. Raises SequenceRefused if it can never run."""
        if new.sequence_id in self._sequences:
            raise ValueError(f"sequence {new.sequence_id} is already here")
        num_prompt, context = len(new.prompt), self.config.context_tokens
        if num_prompt < 1 or new.sampling.max_tokens < 1:
            raise SequenceRefused(
                "invalid_submit",
                f"prompt and max_tokens: found {num_prompt} and {new.sampling.max_tokens} tokens, "
                "allowed 1 or more of each; send at least one token and ask for one",
            )
        if num_prompt >= context:
            raise SequenceRefused(
                "context_length_exceeded",
                f"prompt: found {num_prompt} tokens, allowed {context - 1} (a context of {context} "
                "less one to produce); shorten the prompt",
            )
        if num_prompt >= self._pool_tokens:
            raise SequenceRefused(
                "pool_too_small",
                f"prompt: found {num_prompt} tokens, allowed {self._pool_tokens - 1} (a pool of "
                f"{self._pool_tokens} tokens less one to produce); raise --kv-device-tokens",
            )
        if len(self._waiting) >= self.config.max_waiting:
            raise SequenceRefused(
                "engine_full",
                f"waiting sequences: found {len(self._waiting)}, allowed "
                f"{self.config.max_waiting}; try again later or elsewhere",
            )
        if new.transfer is not None and self.transfers.knows(new.transfer):
            raise SequenceRefused(
                "transfer_refused",
                "transfer: found an id that was used before, allowed one of its own; draw new ids",
            )
        sequence = Sequence(new, now)
        self._sequences[new.sequence_id] = self._waiting[new.sequence_id] = sequence
        if new.transfer is not None:
            self.transfers.begin(sequence)
        if self._leader(sequence) is None:
            self._awaited.begin(sequence, now)

    def abort(self, sequence_id: int, now: float) -> list[SequenceEvent]:
        """The client left. An id that is unknown (or over) is no error: aborts cross finishes."""
        sequence = self._sequences.get(sequence_id)
        return [] if sequence is None else [self._finish(sequence, "abort", now)]

    def finish(self, sequence_id: int, keep: int, now: float) -> list[SequenceEvent]:
        """A stop string matched at the gateway: end with `keep` completion tokens billed."""
        sequence = self._sequences.get(sequence_id)
        return [] if sequence is None else [self._finish(sequence, "stop", now, keep)]

    def expire(self, now: float) -> list[SequenceEvent]:
        """End what is past its deadline."""
        late = [sequence for sequence in self._sequences.values() if sequence.deadline <= now]
        return [
            self._fail(
                sequence,
                "deadline_exceeded",
                f"deadline: found {now - sequence.arrived_at:.1f} s since the submit, allowed "
                f"{sequence.deadline - sequence.arrived_at:.1f} s; allow more or ask for less",
            )
            for sequence in late
        ]

    def fail_all(self, code: str, message: str) -> list[SequenceEvent]:
        """End everything: the runner is broken."""
        return [self._fail(sequence, code, message) for sequence in list(self._sequences.values())]

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def load(self) -> Load:
        uncached = sum(self._uncached_tokens(waiting) for waiting in self._waiting.values())
        for sequence in self._running.values():
            if sequence.num_uncomputed > 1:
                uncached += sequence.num_uncomputed
        return Load(
            waiting_sequences=len(self._sequences) - len(self._running),
            running_sequences=len(self._running),
            uncached_tokens=uncached,
            pages_total=self.pool.num_pages,
            pages_free=self.pool.num_free,
            pages_held=self.pool.num_held,
            pages_cached=self.pool.num_cached,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_tokens_per_s=self.rates.decode_tokens_per_s,
            preemptions=self.preemptions,
            pages_pinned=self.pool.num_with(HoldKind.PIN),
            integrity_faults=self.integrity_faults,
            charged_pages=self.cache.charged_pages,
            quota_breaches=self.cache.quota_breaches,
        )

    def take_page_events(self) -> tuple[int, list[PageEvent]]:
        """(sequence number of the first, the page events since the last call)."""
        return self.page_events.take()

    def purge(self, owner: bytes) -> int:
        """Forget a tenant's pages on the device: what of it runs or waits publishes nothing more.
        Returns how many there were."""
        for sequence in self._sequences.values():
            if sequence.whose.owner == owner:
                sequence.publishes = False
        self.transfers.purge(owner)
        return self.cache.forget_owner(owner)

    def set_quotas(self, shares: Mapping[bytes, float]) -> None:
        """By owner: the share of each tier's pages, the device's too, that is its own."""
        self.cache.set_quotas(quota_pages(shares, self.pool.num_pages))
        self.tiers.set_quotas(shares)

    def take(self, news: TransferNews, now: float) -> list[SequenceEvent]:
        """How a transfer goes on."""
        match self.transfers.take(news, now):
            case Sent(sequence):
                return [self._finish(sequence, "length", now)]
            case Grown(sequence, num_pages):
                num_computed = num_pages * self.config.page_size
                sequence.num_computed = min(num_computed, sequence.num_prompt)
                self._publish(sequence, now)
            case TakenOver(sequence, handover):
                return self._go_on(sequence, handover, now)
            case Returned(chain, pages):
                first = len(chain.keys) - len(pages)
                if not first or chain.keys[first - 1] in self.cache:  # else in doubt meanwhile
                    self._publish_chain(chain, pages, now)
            case Lost(sequence) as lost:
                if lost.is_doubted:
                    self._distrust(sequence)
                return [self._fail(sequence, *lost.end)]
        return []

    # --- a step ---------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        if self._in_flight:
            raise RuntimeError(f"step {self.step} is still in flight; apply its result first")
        preempted: set[int] = set()  # stay out of this step, so that pages are not passed around
        draft = self._fill(now, preempted)
        while not draft.rows and self._running:
            # Every running prompt lacks a page that only another prompt can give up.
            self._give_way(preempted)
            draft = self._fill(now, preempted)
        if not draft.rows and preempted:
            draft = self._fill(now, set())  # nothing runs: now every idle page can be evicted
        return self._take_off(draft, now) if draft.rows else None

    def plan_ahead(self, now: float) -> StepPlan | None:
        """The step behind the one in flight, or None where that one's result must come first.

        Each row computes the token that its sequence's row in flight is about to choose; it is
        right unless that token ends the sequence. What surely ends, by its length, has no row.
        """
        if len(self._in_flight) != 1:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight; one must be")
        (flight,) = self._in_flight
        follows: list[int] = []
        sequences: list[Sequence] = []
        needs: list[bytes] = []  # of a page each: for whom
        num_alive = 0
        for index, (row, sequence) in enumerate(
            zip(flight.plan.rows, flight.sequences, strict=True)
        ):
            if sequence.state is State.FINISHED:
                continue
            num_alive += 1
            num_tokens = len(sequence.tokens) + 1
            if not row.samples:
                return None
            if (
                num_tokens >= self._max_tokens
                or num_tokens - sequence.num_prompt >= sequence.sampling.max_tokens
                or sequence.role == "prefill"
            ):
                continue
            if sequence.penalises:
                return None
            follows.append(index)
            sequences.append(sequence)
            lacks = self._num_pages(num_tokens) - len(sequence.page_table[0])
            needs += [sequence.whose.owner] * lacks
        if not sequences or num_alive < len(self._running):
            return None
        if self._waiting and len(sequences) < self.config.max_running:
            return None
        if not all(self.cache.evict(now, owner) for owner in needs[self.pool.num_free :]):
            return None
        draft = _Draft(self.config.step_tokens, now, set())
        for sequence in sequences:
            end = len(sequence.tokens) + 1
            self._grow(draft, sequence, end)
            self._place(draft, sequence, end - 1, end)
        return self._take_off(draft, now, tuple(follows))

    def _take_off(self, draft: _Draft, now: float, follows: tuple[int, ...] = ()) -> StepPlan:
        self.step += 1
        plan = StepPlan(
            self.step,
            tuple(draft.rows),
            tuple(draft.assigned),
            tuple(draft.zero_tails),
            tuple(draft.copies),
            follows,
        )
        if draft.copies:  # the leader may leave before the copies are made
            sources = [PageId(copy.source) for copy in draft.copies]
            self.pool.hold(sources, HoldKind.STEP)
            self._step_holds[self.step] = sources
        self._in_flight.append(_InFlight(plan, draft.sequences, now))
        return plan

    def apply(self, result: StepResult, now: float) -> list[SequenceEvent]:
        """Take a step's result into the books; what it computed becomes findable only here."""
        if not self._in_flight or self._in_flight[0].plan.step != result.step:
            raise ValueError(
                f"result of step {result.step}: that step is not in flight, or not next"
            )
        in_flight = self._in_flight.pop(0)
        if held := self._step_holds.pop(result.step, None):
            self.pool.release(held, HoldKind.STEP)
        self._measure(in_flight, result, now)
        events: list[SequenceEvent] = []
        rows = zip(in_flight.plan.rows, in_flight.sequences, result.tokens, strict=True)
        for index, (row, sequence, token) in enumerate(rows):
            if sequence.state is State.FINISHED:  # ended while the step ran
                continue
            if not sequence.started:
                events.append(self._start(sequence))
            if result.corrupt and index in result.corrupt:
                events.append(self._fail_corrupt(sequence))
                continue
            if result.insane and index in result.insane:
                events.append(self._fail_insane(sequence))
                continue
            end = row.start + len(row.token_ids)
            if row.samples and token is None and self._in_flight:
                raise ValueError(f"row {index} of step {result.step} is followed, and has no token")
            # "Not yet" concerns the sampled position alone; what came before it is computed.
            sequence.num_computed = end - 1 if row.samples and token is None else end
            self._publish(sequence, now)
            if (told := row.prompt_logprobs) is not None:
                entries = result.prompt_logprobs[index]
                assert len(entries) == len(told), f"row {index} tells of {len(entries)} tokens"
                events.append(PromptTold(sequence.sequence_id, told.start, entries))
                sequence.num_told = told.stop
            if token is None:
                if len(row.token_ids) > 1 and not sequence.num_completion:
                    events.append(PromptAdvanced(sequence.sequence_id, sequence.num_computed))
            else:
                assert row.samples, f"row {index} got a token and did not ask for one"
                logprob = result.logprobs.get(index)
                if sequence.role == "prefill":
                    self._hand_over(sequence, token, logprob)
                else:
                    self._append(sequence, token, logprob, now, events)
        return events

    # --- filling a step -------------------------------------------------------------------------

    def _fill(self, now: float, preempted: set[int]) -> _Draft:
        draft = _Draft(self.config.step_tokens, now, preempted)
        prompts = self._place_decodes(draft)
        self._place_prompts(draft, prompts, now)
        return draft

    def _place_decodes(self, draft: _Draft) -> list[Sequence]:
        """Rows of one token, in order of admission; returns the running prompts."""
        prompts: list[Sequence] = []
        page_size = self.config.page_size
        for sequence in list(self._running.values()):
            num_tokens = len(sequence.tokens)
            if num_tokens - sequence.num_computed > 1:
                prompts.append(sequence)
                continue
            while (
                sequence.state is State.RUNNING
                and len(sequence.page_table[0]) * page_size < num_tokens
                and not self._grow(draft, sequence, num_tokens)
            ):
                # Rows placed so far were admitted earlier, so the victim is never one of them.
                self._give_way(draft.preempted)
            if sequence.state is State.RUNNING:
                self._place(draft, sequence, sequence.num_computed, num_tokens)
        return [sequence for sequence in prompts if sequence.state is State.RUNNING]

    def _place_prompts(self, draft: _Draft, prompts: list[Sequence], now: float) -> None:
        """Rows of many tokens, running and waiting alike, shortest uncached first with ageing."""
        rate = self.rates.prefill_tokens_per_s
        queue = [(s.num_uncomputed + rate * s.arrived_at, s) for s in prompts]
        if self._has_place:
            for waiting in self._waiting.values():
                if waiting.sequence_id not in draft.preempted:
                    uncached = self._uncached_tokens(waiting)
                    queue.append((uncached + rate * waiting.arrived_at, waiting))
        queue.sort(key=lambda entry: entry[0])  # stable: ties keep the order of admission, arrival
        admitting = True
        for _, sequence in queue:
            computes = sequence.role != "decode"
            if computes and draft.budget <= 0:
                continue
            if sequence.state is State.WAITING:
                if not admitting or not self._has_place or not self._is_due(draft, sequence):
                    continue
                admitting = self._admit(draft, sequence, now)
                while not admitting and not self._running and self._let_go(draft.preempted):
                    admitting = self._admit(draft, sequence, now)
                # Nobody behind may take the pages that it waits for, or it could starve.
                if not admitting or not computes:
                    continue
            end = min(len(sequence.tokens), sequence.num_computed + draft.budget)
            self._grow(draft, sequence, end)
            end = min(end, len(sequence.page_table[0]) * self.config.page_size)
            if end > sequence.num_computed:
                self._place(draft, sequence, sequence.num_computed, end)

    def _place(self, draft: _Draft, sequence: Sequence, start: int, end: int) -> None:
        """Add the row that computes [start, end); its pages are there already."""
        num_tokens = max(end, len(sequence.tokens))  # ahead, the row's token is not among them
        told = sequence.prompt_logprobs(start, end) if start < sequence.num_prompt else None
        draft.rows.append(
            Row(
                sequence.sequence_id,
                start,
                sequence.tokens[start:end] or array("I", (0,)),  # ahead: see StepPlan.follow
                sequence.page_table,  # type: ignore[arg-type]  # PageId is int
                sequence.generations,
                sequence.sampling,
                num_tokens - sequence.num_prompt,
                end == num_tokens,
                sequence.tokens if told is not None or sequence.penalises else None,
                told,
            )
        )
        draft.sequences.append(sequence)
        draft.budget -= end - start
        page_size = self.config.page_size
        offset = end % page_size
        if offset and draft.assigned:
            last = (sequence.page_table[0][-1], sequence.generations[0][-1])
            if draft.assigned[-1] == last:  # new in this step: its tail was never written
                draft.zero_tails.append((last[0], offset))
        if end - start > 1:
            draft.computing.update(sequence.keys[start // page_size : -(-end // page_size)])

    @property
    def _has_place(self) -> bool:
        """One more may run; what is being taken over has its place already."""
        return len(self._running) + self.transfers.imports.num_moving < self.config.max_running

    def _is_due(self, draft: _Draft, sequence: Sequence) -> bool:
        """Whether a waiting sequence need not wait for what others compute or bring."""
        if sequence.role == "prefill" and not self.transfers.exports.may_compute(sequence):
            return False
        leader = self._leader(sequence)
        if leader is not None:
            return leader.is_computed(sequence.num_prompt - 1)
        return not self._awaited.is_coming(sequence, draft.computing, draft.now)

    def _spare_pages(self) -> int:
        """Pages that can be had beside what running sequences need and may soon grow by."""
        spare = self.pool.num_free + self.pool.num_cached
        for running in self._running.values():
            lacks = self._num_pages(len(running.tokens)) - len(running.page_table[0])
            spare -= 1 + max(0, lacks)
        return spare - self.transfers.imports.num_moving

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """Whose pages a waiting sequence is to share; None: it goes its own way."""
        if sequence.fork_of is None or sequence.num_completion:
            return None
        return self._sequences.get(sequence.fork_of)

    def _admit(self, draft: _Draft, sequence: Sequence, now: float) -> bool:
        """Move a waiting sequence to running on its prefix hit or its leader's pages, if its whole
        history fits; or to being taken over, if its whole prompt does.

        Room is asked for the history, for what running prompts still need, and for one page each
        running sequence may soon grow by; so a prompt rarely has to be preempted half computed.
        """
        if sequence.role == "decode":
            if not self.transfers.imports.take_room(sequence, self._spare_pages, now):
                return False
            del self._waiting[sequence.sequence_id]
            self._note_hit(sequence, now)
            return True
        page_size = self.config.page_size
        leader = self._leader(sequence)
        if leader is None:
            keys = sequence.hit_keys(page_size)
            pages = self.cache.hold_prefix(keys, len(keys))
        else:
            pages = leader.page_table[0][: (sequence.num_prompt - 1) // page_size]
            self.pool.hold(pages, HoldKind.SEQUENCE)
        num_sealed = len(pages)
        num_computed = num_sealed * page_size
        fits = self._num_pages(len(sequence.tokens)) - num_sealed <= self._spare_pages()
        if fits and leader is not None and num_computed < sequence.num_prompt - 1:
            target = self._take(draft, sequence)
            if target is None:
                fits = False
            else:
                source = leader.page_table[0][num_sealed]
                generation = leader.generations[0][num_sealed]
                draft.copies.append(PageCopy(len(draft.rows), source, generation, target))
                pages.append(target)
                num_computed = sequence.num_prompt - 1
        if not fits:
            self.pool.release(reversed(pages), HoldKind.SEQUENCE)
            return False
        del self._waiting[sequence.sequence_id]
        self._running[sequence.sequence_id] = sequence
        generations = [self.pool.generations[page] for page in pages]
        sequence.admit(pages, generations, num_computed=num_computed, num_sealed=num_sealed)
        if not sequence.started:
            sequence.first_planned_at = now
            sequence.cached_tokens = sequence.num_computed
            if leader is None:
                self._note_hit(sequence, now)
                sources = self.cache.count_sources(sequence.keys[:num_sealed], sequence.arrived_at)
                sequence.tier_tokens = {tier: count * page_size for tier, count in sources.items()}
        if sequence.role == "prefill":
            self.transfers.exports.sealed(sequence)
        return True

    def _note_hit(self, sequence: Sequence, now: float) -> None:
        """A sequence begins on a prefix hit: keep what is used."""
        keys, until = sequence.keys[: sequence.num_sealed], sequence.retain_until(now)
        self.cache.use(keys, now, retain_until=until)
        if self.tiers and sequence.publishes:
            self.tiers.used(Chain(keys, sequence.whose, until), now)

    def _grow(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> bool:
        """Add pages until num_tokens fit, evicting what nobody uses; False if it fell short."""
        lacks = self._num_pages(num_tokens) - len(sequence.page_table[0])
        if lacks <= 0:
            return True
        pages: list[PageId] = []
        while len(pages) < lacks and (page := self._take(draft, sequence)) is not None:
            pages.append(page)
        sequence.grow(pages, [self.pool.generations[page] for page in pages])
        return len(pages) == lacks

    def _take(self, draft: _Draft, sequence: Sequence) -> PageId | None:
        page = self.pool.take(HoldKind.SEQUENCE)
        if page is None and self.cache.evict(draft.now, sequence.whose.owner):
            page = self.pool.take(HoldKind.SEQUENCE)
        if page is not None:
            draft.assigned.append((page, self.pool.generations[page]))
        return page

    def _give_way(self, preempted: set[int]) -> None:
        """Somebody's pages are for others: those of a prompt that nobody takes over yet, else of
        the latest admitted."""
        if not self._let_go(preempted):
            self._preempt(self._running[next(reversed(self._running))], preempted)

    def _let_go(self, preempted: set[int]) -> bool:
        """Take its pages from a prompt that is computed and that its peer has no room for yet;
        whether there was one. Two engines that are each full of what waits for the other would else
        wait for ever."""
        sequence = self.transfers.exports.let_go()
        if sequence is not None:
            self._send_back(sequence, preempted)
        return sequence is not None

    def _preempt(self, sequence: Sequence, preempted: set[int]) -> None:
        del self._running[sequence.sequence_id]
        self._send_back(sequence, preempted)
        self.preemptions += 1

    def _send_back(self, sequence: Sequence, preempted: set[int]) -> None:
        """To waiting, pages given up; the history stays and is computed again, or hit."""
        assert not self._in_flight, "a step in flight writes pages that another may get"
        self._waiting[sequence.sequence_id] = sequence
        self.pool.release(sequence.leave(State.WAITING), HoldKind.SEQUENCE)
        preempted.add(sequence.sequence_id)

    def _uncached_tokens(self, sequence: Sequence) -> int:
        if sequence.role == "decode":
            return 0  # another engine computes it
        if self._leader(sequence) is not None:
            return 1
        page_size = self.config.page_size
        return len(sequence.tokens) - self.cache.depth(sequence.hit_keys(page_size)) * page_size

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    # --- taking a result ------------------------------------------------------------------------

    def _publish(self, sequence: Sequence, now: float) -> None:
        """Publish the pages that this step sealed."""
        sealed = sequence.num_computed // self.config.page_size
        if sealed <= sequence.num_sealed:
            return
        sequence.num_sealed = sealed
        if sequence.role == "prefill":
            self.transfers.exports.sealed(sequence)
        if sequence.publishes:
            keys = sequence.page_keys(sealed, self.config.page_size)
            chain = Chain(keys, sequence.whose, sequence.retain_until(now))
            self._publish_chain(chain, sequence.page_table[0][:sealed], now)

    def _publish_chain(self, chain: Chain, pages: list[PageId], now: float) -> None:
        """pages: the last ones of the chain; what is before them is resident."""
        new = self.cache.publish(
            chain.keys,
            pages,
            first=len(chain.keys) - len(pages),
            whose=chain.whose,
            now=now,
            retain_until=chain.retain_until,
        )
        if self.tiers and new:
            self.tiers.sealed(chain, new, now)

    def _hand_over(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """A prompt that was computed for another engine is there, with its first token."""
        del self._running[sequence.sequence_id]
        sequence.transition(State.MOVING)
        host, disk, cluster = sequence.slower_tokens
        cached, queue_s = sequence.cached_tokens, sequence.queue_s
        handover = Handover(token, cached, host, disk, cluster, queue_s, logprob)
        self.transfers.exports.hand_over(sequence, handover)

    def _go_on(self, sequence: Sequence, handover: Handover, now: float) -> list[SequenceEvent]:
        """A prompt that another engine computed is here, with its first token."""
        sequence.transition(State.RUNNING)
        self._running[sequence.sequence_id] = sequence
        sequence.take_over(handover)
        events: list[SequenceEvent] = [self._start(sequence)]
        self._append(sequence, handover.token, handover.logprob, now, events)
        return events

    def _start(self, sequence: Sequence) -> SequenceStarted:
        sequence.started = True
        return SequenceStarted(
            sequence.sequence_id,
            sequence.cached_tokens,
            sequence.queue_s,
            sequence.slowest_tier,
            sequence.slower_tokens,
        )

    def _append(
        self,
        sequence: Sequence,
        token: int,
        logprob: TokenLogprob | None,
        now: float,
        events: list[SequenceEvent],
    ) -> None:
        sequence.tokens.append(token)
        logprobs = () if logprob is None else (logprob,)
        events.append(TokensProduced(sequence.sequence_id, (token,), logprobs))
        sampling, produced = sequence.sampling, len(sequence.tokens) - sequence.num_prompt
        if token in sampling.stop_token_ids and produced >= sampling.min_tokens:
            events.append(self._finish(sequence, "stop", now))
        elif produced >= sampling.max_tokens or len(sequence.tokens) >= self._max_tokens:
            events.append(self._finish(sequence, "length", now))

    def _fail_corrupt(self, sequence: Sequence) -> SequenceFailed:
        """Some page of this sequence is not what its tag says: distrust all that it found."""
        pages: Seq[PageId] = sequence.page_table[0]
        self.integrity_faults += 1
        self.cache.forget(pages)
        return self._fail(
            sequence,
            "page_integrity",
            "pages: found a tag of another generation, allowed only the expected one; "
            "send the request again, its prefix will be computed anew",
        )

    def _distrust(self, sequence: Sequence) -> None:
        """Its pages may be wrong, whatever their tags say; and so may copies of them."""
        self.cache.forget(sequence.page_table[0])
        if self.tiers:
            self.tiers.distrust(sequence.page_keys(sequence.num_sealed, self.config.page_size))

    def _fail_insane(self, sequence: Sequence) -> SequenceFailed:
        self._distrust(sequence)
        return self._fail(
            sequence,
            "logits_not_finite",
            "logits: found NaN or infinity, allowed finite numbers; send the request again, its "
            "prefix will be computed anew, and report the model if it fails again",
        )

    def _measure(self, in_flight: _InFlight, result: StepResult, now: float) -> None:
        decodes = prompts = 0
        for row, token in zip(in_flight.plan.rows, result.tokens, strict=True):
            num_tokens = len(row.token_ids)
            if num_tokens > 1:
                prompts += num_tokens
            elif token is not None:
                decodes += 1
        step_s = result.compute_s or now - in_flight.planned_at
        self.rates.record(prefill_tokens=prompts, decode_tokens=decodes, step_s=step_s)

    # --- the end of a sequence ------------------------------------------------------------------

    def _finish(
        self, sequence: Sequence, reason: FinishReason, now: float, keep: int | None = None
    ) -> SequenceFinished:
        if self.tiers and sequence.publishes and sequence.num_sealed:
            keys = sequence.page_keys(sequence.num_sealed, self.config.page_size)
            self.tiers.ended(Chain(keys, sequence.whose, sequence.retain_until(now)), now)
        if sequence.transfer is not None and sequence.role == "mixed" and sequence.publishes:
            self.transfers.exports.send_back(sequence, now)
        self._leave(sequence, "aborted", "its client left")
        return SequenceFinished(sequence.sequence_id, reason, sequence.usage(keep))

    def _fail(self, sequence: Sequence, code: str, message: str) -> SequenceFailed:
        self._leave(sequence, code, message)
        return SequenceFailed(sequence.sequence_id, code, message, sequence.usage())

    def _leave(self, sequence: Sequence, code: str, message: str) -> None:
        """Forget a sequence. Pages that a step in flight still writes keep a step hold. code and
        message: for an engine that still waits for it."""
        self.transfers.leave(sequence, code, message)
        del self._sequences[sequence.sequence_id]
        self._waiting.pop(sequence.sequence_id, None)
        self._running.pop(sequence.sequence_id, None)
        pages = sequence.leave(State.FINISHED)
        for in_flight in reversed(self._in_flight):
            if any(row is sequence for row in in_flight.sequences):
                self.pool.hold(pages, HoldKind.STEP)
                self._step_holds.setdefault(in_flight.plan.step, []).extend(pages)
                break
        self.pool.release(pages, HoldKind.SEQUENCE)

    def invariants(self) -> None:
        """Raise AssertionError unless pages, cache and sequences tell one story."""
        self.pool.invariants()
        self.cache.invariants()
        self.tiers.invariants(self.transfers.holds())
        self.transfers.invariants()
        held: dict[PageId, int] = {}
        for sequence in self._sequences.values():
            (pages,), (generations,) = sequence.page_table, sequence.generations
            assert [self.pool.generations[page] for page in pages] == generations
            assert sequence.num_computed <= len(sequence.tokens)
            assert sequence.num_computed <= len(pages) * self.config.page_size
            waits = sequence.sequence_id in self._waiting
            assert waits == (sequence.state is State.WAITING)
            runs = sequence.sequence_id in self._running
            assert runs == (sequence.state is State.RUNNING)
            assert not (waits and pages)
            for page in pages:
                held[page] = held.get(page, 0) + 1
            assert 1 <= sequence.num_told <= sequence.num_prompt
            assert sequence.num_told == sequence.num_prompt or not sequence.num_completion
        for page in map(PageId, range(self.pool.num_pages)):
            assert self.pool.holds(page, HoldKind.SEQUENCE) == held.get(page, 0)
        assert len(self._running) + self.transfers.imports.num_moving <= self.config.max_running
        steps = [in_flight.plan.step for in_flight in self._in_flight]
        assert steps == list(range(self.step - len(steps) + 1, self.step + 1))
        assert len(steps) <= 2
        assert self._step_holds.keys() <= set(steps)
