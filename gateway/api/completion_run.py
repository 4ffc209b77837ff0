"""One request between its dispatch and its settlement: streams, counts, row, and the single end."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from gateway.api.booking import open_row, tell_completion
from gateway.api.choice import Choice, Turn
from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, late_first_token
from gateway.ledger.keys import Key
from gateway.ledger.rows import Attempt, Ending, Quality, Settlement
from gateway.nodes.fleet import NoCapacity, NoNode, OldNodes, TooLate
from gateway.nodes.streams import Dispatch, Stream, Waiter
from gateway.services import Services
from policies.contract.wire import EngineInfo, Usage
from policies.pricing import Rates, charge_nano_usd

DEADLINE_GRACE_S = 5.0  # the engine ends what is late; this is for when it cannot


@dataclass(slots=True, eq=False)
class Part:
    """One prompt of a request, and the choices that continue it: one a lane."""

    dispatch: Dispatch
    choices: list[Choice]
    stream: Stream | None = None

    def count_unread(self) -> None:
        """What choices produced that did not end, for a run that is given up."""
        for lane, choice in enumerate(self.choices):
            if self.stream is not None:
                choice.count(self.stream.produced_on(lane))

    @property
    def is_over(self) -> bool:
        return all([choice.reason is not None for choice in self.choices])


@dataclass(slots=True, eq=False)
class CompletionRun:
    """Call `dispatch` first. Parts that find no place wait until earlier ones are over."""

    services: Services
    exchange: Exchange
    parts: list[Part]
    model: str
    rates: Rates
    created: int = field(default_factory=lambda: int(time.time()))
    first_token_at: float | None = None
    is_open: bool = True
    is_broken: bool = False  # a fault of ours: nothing is billed
    _running: list[tuple[Part, Stream]] = field(default_factory=list)
    _waiting: deque[Part] = field(default_factory=deque)
    _waiter: Waiter = field(default_factory=Waiter)
    _has_row: bool = False

    @property
    def choices(self) -> list[Choice]:
        return [choice for part in self.parts for choice in part.choices]

    @property
    def first(self) -> Stream:
        """Of the first prompt; it is what headers and the row tell of."""
        stream = self.parts[0].stream
        assert stream is not None, "dispatch comes first"
        return stream

    @property
    def is_complete(self) -> bool:
        """Every choice ended as it should."""
        return not self._running and not self._waiting

    @property
    def prompt_tokens(self) -> int:
        return sum([len(part.dispatch.prompt) for part in self.parts])

    def dispatch(self) -> None:
        """Place the first prompt and what may run beside it. GatewayError: no node takes it."""
        self._waiting.extend(self.parts)
        self._place()

    def _place(self) -> None:
        """One request's prompts take turns, so that it cannot fill every node by itself."""
        most = self.services.config.limits.choices
        lanes = sum([len(part.choices) for part, _ in self._running])
        while self._waiting and (not lanes or lanes + len(self._waiting[0].choices) <= most):
            part = self._waiting[0]
            dispatch = part.dispatch
            if part is not self.parts[0]:
                left_s = self.exchange.started + dispatch.deadline_s - time.monotonic()
                dispatch = replace(dispatch, deadline_s=max(left_s, 0.001))
            try:
                part.stream = self.services.fleet.dispatch(dispatch, self._waiter)
            except (NoCapacity, NoNode) as refusal:
                if not lanes:
                    raise _no_place(refusal) from None
                return  # one of ours will end and make room
            self._waiting.popleft()
            self._running.append((part, part.stream))
            lanes += len(part.choices)

    async def open_row(self, key: Key, *, session: bytes | None, deepest_key: bytes | None) -> None:
        """Returns when the row is committed; nothing is sent to the client before. LedgerFull."""
        self._has_row = True  # from here on it is settled, even if we are cancelled while waiting
        await open_row(
            self.services,
            self.exchange,
            key,
            model=self.model,
            path=self.first.path,
            prompt_tokens=self.prompt_tokens,
            rates=self.rates,
            node=self.first.node_id,
            session=session,
            deepest_key=deepest_key,
        )

    async def next(self, timeout_s: float | None = None) -> list[Turn]:
        """What choices have to say, or nothing when timeout_s passed.

        Raises GatewayError past the deadline, or when no node takes a prompt that had to wait.
        """
        turns = self._take()
        if turns:
            return turns
        deadline_s = self.services.config.limits.request_deadline_s + DEADLINE_GRACE_S
        left_s = self.exchange.started + deadline_s - time.monotonic()
        await self._waiter.wait(left_s if timeout_s is None else min(timeout_s, left_s))
        turns = self._take()
        # Not by the clock: a loop's timer may ring a millisecond early.
        if turns or (timeout_s is not None and timeout_s < left_s):
            return turns
        raise GatewayError(
            "deadline_exceeded",
            found=f"no end after {deadline_s:g} s",
            allowed=f"{deadline_s:g} s",
            remedy="ask for fewer tokens",
        )

    def _take(self) -> list[Turn]:
        turns: list[Turn] = []
        ended = False
        for part, stream in self._running:
            for burst in stream.take():
                turn = part.choices[burst.index].take(burst, stream)
                turns.append(turn)
                ended = ended or turn.reason is not None
        if turns and self.first_token_at is None and self._produced():
            self.first_token_at = time.monotonic()
            self.first.lift_ttft_deadline()
        if ended:
            self._running = [(part, one) for part, one in self._running if not part.is_over]
            self._place()
        return turns

    def _produced(self) -> int:
        return sum([part.stream.produced for part in self.parts if part.stream is not None])

    def usage(self) -> Usage:
        """Each prompt that was dispatched counts once, however many choices continue it."""
        prompt, cached, completion = 0, 0, 0
        for part in self.parts:
            if part.stream is not None:
                prompt += len(part.dispatch.prompt)
                cached += min(part.stream.cached_tokens or 0, len(part.dispatch.prompt))
                completion += sum([choice.completion_tokens for choice in part.choices])
        return Usage(prompt, cached, completion)

    def cost_nano_usd(self) -> int:
        return charge_nano_usd(self.usage(), self.rates)

    def headers(self) -> list[tuple[str, str]]:
        """Where and how it runs, as far as it is known now."""
        first = self.first
        info = first.info
        headers = [
            ("x-kagari-region", self.services.config.region.name),
            ("x-kagari-node", first.node_id),
            ("x-kagari-path", first.path),
            ("x-kagari-affinity", first.affinity),
            ("x-kagari-precision", _precision(first.prefill_info, info)),
        ]
        if first.prefill_node is not None:
            headers.append(("x-kagari-prefill-node", first.prefill_node))
        streams = [part.stream for part in self.parts]
        if all(stream is not None and stream.cached_tokens is not None for stream in streams):
            headers.append(("x-kagari-cached-tokens", str(self.usage().cached_tokens)))
        return headers

    def close(self, *, client_left: bool) -> None:
        """Abort what still runs and settle. The first call counts; it never waits."""
        if not self.is_open:
            return
        self.is_open = False
        self._abort()
        if self.is_complete and not self.is_broken:
            status: Ending = "ok"
        else:
            status = "client_left" if client_left else "failed"
            for part in self.parts:
                part.count_unread()
        ended = time.monotonic()
        ttft_s = (
            None if self.first_token_at is None else self.first_token_at - self.exchange.started
        )
        if self._has_row:
            self.services.ledger.settle(self._settlement(status, ttft_s))
            self.exchange.is_billed = status != "failed"
        self._tell(status, ttft_s, ended)

    def discard(self) -> None:
        """The row was refused: stop the work, settle nothing."""
        self.is_open = False
        self._abort()

    def _abort(self) -> None:
        for part in self.parts:
            if part.stream is not None:
                part.stream.abort()

    def _settlement(self, status: Ending, ttft_s: float | None) -> Settlement:
        usage = self.usage()
        quality: Quality = "exact" if status == "ok" else "partial"
        streams = [part.stream for part in self.parts if part.stream is not None]
        failed = [one for stream in streams for one in stream.tries[:-1]]
        return Settlement(
            request_id=self.exchange.request_id,
            status=status,
            quality=quality,
            node=self.first.node_id,
            prefill_node=self.first.prefill_node,
            path=self.first.path,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            tiers=self._tiers(),
            attempts=tuple(
                Attempt(number, one.node_id, "failed", prefill_node=one.prefill_node)
                for number, one in enumerate(failed, start=1)
            ),
            ended_at=time.time(),
            ttft_s=ttft_s,
            prompt_tokens=None
            if usage.prompt_tokens == self.prompt_tokens
            else usage.prompt_tokens,
        )

    def _tiers(self) -> dict[str, int]:
        """Cached tokens by the tier that held them."""
        tiers: dict[str, int] = {}
        for part in self.parts:
            if part.stream is not None:
                for tier, tokens in part.stream.cached_by_tier.items():
                    tiers[tier] = tiers.get(tier, 0) + tokens
        return tiers

    def _tell(self, status: Ending, ttft_s: float | None, ended: float) -> None:
        usage = self.usage()
        first = self.first
        tell_completion(
            self.services.metrics, self.model, status, usage, self._tiers(), ttft_s, first.path
        )
        self.services.metrics.observe("kagari_queue_seconds", first.waited_s, model=self.model)
        self.exchange.notes.update(
            node=first.node_id,
            prefill_node=first.prefill_node,
            attempts=first.attempt,
            path=first.path,
            cached_tokens=usage.cached_tokens,
            tiers=self._tiers(),
            completion_tokens=usage.completion_tokens,
            finish="+".join(sorted({choice.reason or status for choice in self.choices})),
            ttft_s=None if ttft_s is None else round(ttft_s, 4),
            queue_s=round(first.queue_s, 4),
            waited_s=round(first.waited_s, 4),
            served_s=round(ended - self.exchange.started, 4),
        )


def _precision(prefill: EngineInfo | None, info: EngineInfo) -> str:
    """weights/pages, and a third part where the engine does not compute exactly; of a split between
    two precisions that of prefill first."""
    told = [_held(one) for one in (prefill, info) if one is not None]
    return " > ".join(dict.fromkeys(told))


def _held(info: EngineInfo) -> str:
    held = f"{info.weights_precision}/{info.kv_precision}"
    return held if info.compute == "exact" else f"{held}/{info.compute}"


def _no_place(refusal: NoCapacity | NoNode) -> GatewayError:
    if isinstance(refusal, TooLate):
        return late_first_token(refusal.first_token_s, refusal.retry_after_s)
    if isinstance(refusal, NoCapacity):
        return GatewayError(
            "capacity_exceeded",
            field="model",
            found="every node that serves it full",
            allowed="a node with room",
            remedy="send the request again",
            retry_after_s=refusal.retry_after_s,
        )
    if isinstance(refusal, OldNodes):
        return GatewayError(
            "no_node",
            field="model",
            found="only nodes too old for penalties, logit_bias and log probabilities",
            allowed="a node of this gateway's version",
            remedy="leave those fields out, or ask the operator to upgrade the nodes",
            retry_after_s=30.0,
        )
    return GatewayError(
        "no_node",
        field="model",
        found="no node that serves it",
        allowed="a node that is ready",
        remedy="send the request again",
        retry_after_s=2.0,
    )
