"""A relayed request between its dispatch and its settlement: attempts, counts, row, the one end.

Beside `gateway/api/completion_run.py`, which does the same for our own engines. One task makes the
attempts and fills the feed; the handler takes from it, so heartbeats go on whatever the task does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from gateway.api.booking import open_row, tell_completion
from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, late_first_token
from gateway.ledger.keys import Key
from gateway.ledger.rows import Attempt as FailedAttempt
from gateway.ledger.rows import Ending, Quality, Settlement
from gateway.nodes.placement import NoCapacity, NoNode, TooLate
from gateway.services import Services
from gateway.upstreams.events import Event
from gateway.upstreams.faults import UpstreamFault, broken
from gateway.upstreams.feed import Feed
from gateway.upstreams.legs import Attempt
from gateway.upstreams.registry import Ask, Upstreams, Way
from gateway.upstreams.request import RelayRequest, edited, limited
from gateway.upstreams.rewrite import StreamRewriter
from gateway.upstreams.server import Lease, Server
from gateway.upstreams.usage import Merged, Told, merge
from policies.breaker import Outcome
from policies.contract.wire import Usage
from policies.pricing import Rates, charge_nano_usd
from policies.residency import tokens_by_tier

PATH: Final = "upstream"
MAX_ATTEMPTS = 3
DEADLINE_GRACE_S = 5.0
LATE_RETRY_S = 1.0  # of a server that is late nobody knows how long it will be


@dataclass(slots=True, eq=False)
class UpstreamRun:
    """Call `dispatch` first, then `open_row`, then `next` until it is complete, then `close`."""

    services: Services
    upstreams: Upstreams
    exchange: Exchange
    request: RelayRequest
    ask: Ask
    tenant: str
    max_tokens: int | None  # a limit that the upstream is told; None: what the client said
    rates: Rates
    rewriter: StreamRewriter
    first_token_at: float | None = None
    is_broken: bool = False  # a fault of ours: nothing is billed
    told: Told | None = None  # of an answer that was not streamed
    _feed: Feed = field(default_factory=Feed)
    _way: Way | None = None
    _leases: dict[Server, Lease] = field(default_factory=dict)
    _attempts: list[FailedAttempt] = field(default_factory=list)
    _attempt: Attempt | None = None
    _task: asyncio.Task[None] | None = None
    _is_open: bool = True
    _has_row: bool = False

    @property
    def way(self) -> Way:
        assert self._way is not None, "dispatch comes first"
        return self._way

    @property
    def is_complete(self) -> bool:
        """All was taken, and it ended as it should."""
        return self._feed.is_over and self._feed.is_empty and self._feed.error is None

    @property
    def whole(self) -> bytes:
        """The answer of a request that did not ask for a stream."""
        assert self._feed.whole is not None, "it is complete"
        return self._feed.whole

    # --- attempts ---------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Choose a way and start. Raises GatewayError."""
        try:
            self._lease()
        except TooLate as refusal:
            raise late_first_token(refusal.first_token_s, refusal.retry_after_s) from None
        except NoCapacity as refusal:
            raise _full(refusal.retry_after_s) from None
        except NoNode:
            raise _none_up() from None
        self._task = asyncio.create_task(self._work())

    def _lease(self) -> None:
        """Raises NoNode, NoCapacity or TooLate; then nothing is held."""
        now = self.upstreams.clock()
        way = self._way = self.upstreams.choose(self.ask)
        self._leases = {way.first: way.first.lease(way.uncached_tokens, now)}
        if way.decode is not None:
            self._leases[way.decode] = way.decode.lease(0, now)

    def _release(self, outcome: Outcome, at: Server | None = None) -> None:
        """at: the outcome is of this server alone."""
        now = self.upstreams.clock()
        for server, lease in self._leases.items():
            lease.end(outcome if at is None or at is server else "neither", now)

    async def _work(self) -> None:
        while True:
            self._attempt = self._next_attempt()
            try:
                await self._attempt.run()
            except UpstreamFault as fault:
                self._release(fault.outcome, fault.server)
                if not self._goes_on(fault):
                    self._feed.end(fault.error)
                    return
            except Exception:
                self._feed.end(broken())
                raise
            else:
                self._release("worked")
                self._feed.end()
                return

    def _next_attempt(self) -> Attempt:
        way, number = self.way, len(self._attempts)
        upstream = way.upstream
        salt = upstream.cache_salt(self.tenant) if upstream.is_salted else ""
        own_name = self.ask.model.own_name(upstream)
        members = edited(self.request, upstream.config, own_name, salt)
        if self.max_tokens is not None:
            members = limited(members, self.max_tokens)
        return Attempt(
            request=self.request,
            way=way,
            members=members,
            headers=self._sent_headers(number),
            feed=self._feed,
            deadline_s=self._left_s(),
            computed=self._computed,
            start_ending=self.upstreams.start_ending,
        )

    def _sent_headers(self, number: int) -> Mapping[str, str]:
        """Our ids, never the client's: an upstream learns nothing of who asks."""
        request_id = self.exchange.request_id
        sent = {"x-request-id": f"{request_id}.{number}" if number else request_id}
        if self.ask.session is not None:
            sent["x-session-affinity"] = self.ask.session.hex()
        return sent

    def _computed(self) -> None:
        """The first byte of an answer, or a prefill server's whole one."""
        lease = self._leases[self.way.first]
        if not lease.is_computed:
            lease.computed()
            keys = self.ask.keys(self.way.upstream)
            self.way.first.expect(keys, self.upstreams.clock())

    def _goes_on(self, fault: UpstreamFault) -> bool:
        """Whether another attempt begins: only while nothing of an answer has come."""
        server = fault.server or self.way.first
        self._attempts.append(FailedAttempt(len(self._attempts) + 1, server.name, fault.error.code))
        will = (
            fault.may_retry
            and not self._feed.has_begun
            and len(self._attempts) < MAX_ATTEMPTS
            and self._left_s() > 0
        )
        was_tried = server.name in self.ask.tried
        self.ask.tried.append(server.name)
        self.services.log.warning(
            "upstream_attempt_failed",
            request_id=self.exchange.request_id,
            server=server.name,
            code=fault.error.code,
            told=str(fault)[:300],
        )
        if not will or was_tried:
            return False
        try:
            self._lease()
        except (NoNode, NoCapacity):
            return False
        self.services.metrics.count("kagari_upstream_retries", upstream=self.way.first.name)
        return True

    def _left_s(self) -> float:
        deadline_s = self.services.config.limits.request_deadline_s + DEADLINE_GRACE_S
        return self.exchange.started + deadline_s - time.monotonic()

    def _ttft_left_s(self) -> float:
        """Without end where its first token came, or cannot be told from the rest."""
        if self.ask.ttft_by is None or self._feed.has_begun or not self.request.stream:
            return inf
        return self.ask.ttft_by - self.upstreams.clock()

    # --- its reader -------------------------------------------------------------------------------

    async def next(self, timeout_s: float | None = None) -> list[Event]:
        """What came, or nothing when timeout_s passed or all is over. Raises GatewayError."""
        whole_s, first_s = self._left_s(), self._ttft_left_s()
        left_s = min(whole_s, first_s)
        await self._feed.wait(left_s if timeout_s is None else min(timeout_s, left_s))
        events = self._feed.take()
        if (events or self._feed.whole is not None) and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if events:
            return events
        if self._feed.error is not None:
            raise self._feed.error
        if not self._feed.is_over and (timeout_s is None or timeout_s >= left_s):
            if first_s < whole_s:
                raise late_first_token(None, LATE_RETRY_S)
            limit_s = self.services.config.limits.request_deadline_s
            raise GatewayError(
                "deadline_exceeded",
                found=f"no end after {limit_s:g} s",
                allowed=f"{limit_s:g} s",
                remedy="ask for fewer tokens",
            )
        return []

    # --- its end ----------------------------------------------------------------------------------

    async def open_row(self, key: Key, *, session: bytes | None, deepest_key: bytes | None) -> None:
        """Returns when the row is committed; nothing is sent to the client before. LedgerFull."""
        self._has_row = True  # from here on it is settled, even if we are cancelled while waiting
        await open_row(
            self.services,
            self.exchange,
            key,
            model=self.ask.model.canonical,
            path=PATH,
            prompt_tokens=self.ask.prompt_tokens,
            rates=self.rates,
            node=self.way.answering.name,
            session=session,
            deepest_key=deepest_key,
        )

    @property
    def last_told(self) -> Told | None:
        return self.told or self.rewriter.told

    def merged(self) -> Merged:
        attempt = self._attempt
        return merge(
            self.last_told,
            None if attempt is None else attempt.prefill_told,
            is_split=self.way.decode is not None,
            prompt=self.ask.prompt_tokens,
            completion=self.rewriter.num_events,
        )

    def usage(self) -> Usage:
        return self.merged().usage

    def cost_nano_usd(self) -> int:
        return charge_nano_usd(self.usage(), self.rates)

    def headers(self) -> list[tuple[str, str]]:
        way = self.way
        headers = [
            ("x-kagari-region", self.services.config.region.name),
            ("x-kagari-node", way.answering.name),
            ("x-kagari-path", PATH),
            ("x-kagari-affinity", way.decision.affinity),
        ]
        if way.decode is not None:
            headers.append(("x-kagari-prefill-node", way.first.name))
        if self.is_complete:
            headers.append(("x-kagari-cached-tokens", str(self.usage().cached_tokens)))
        return headers

    def close(self, *, client_left: bool) -> None:
        """End what still runs and settle. The first call counts; it never waits."""
        if not self._is_open:
            return
        is_ok = self.is_complete and not self.is_broken
        self.discard()
        status: Ending = "ok" if is_ok else "client_left" if client_left else "failed"
        if self._has_row:
            self.services.ledger.settle(self._settlement(status))
            self.exchange.is_billed = status != "failed"
        self._tell(status)

    def discard(self) -> None:
        """Stop the work, settle nothing."""
        self._is_open = False
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self.upstreams.let_end(self._task)
        self._release("neither")

    def _settlement(self, status: Ending) -> Settlement:
        merged, way = self.merged(), self.way
        quality: Quality = "exact" if status == "ok" else "partial"
        usage = merged.usage
        return Settlement(
            request_id=self.exchange.request_id,
            status=status,
            quality=quality if merged.is_exact else "estimated",
            node=way.answering.name,
            prefill_node=None if way.decode is None else way.first.name,
            path=PATH,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            tiers=tokens_by_tier(usage.cached_tokens, {}),
            # Of a failed request the ledger adds the last one itself.
            attempts=tuple(self._attempts[:-1] if self._feed.error else self._attempts),
            ended_at=time.time(),
            ttft_s=self._ttft_s(),
            prompt_tokens=usage.prompt_tokens,
        )

    def _ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.exchange.started

    def _tell(self, status: Ending) -> None:
        merged, way = self.merged(), self.way
        metrics, ttft_s = self.services.metrics, self._ttft_s()
        tell_completion(
            metrics,
            self.ask.model.canonical,
            status,
            merged.usage,
            tokens_by_tier(merged.usage.cached_tokens, {}),
            ttft_s,
            PATH,
        )
        metrics.count("kagari_upstream_requests", upstream=way.answering.name, outcome=status)
        for field_name in merged.anomalies:
            metrics.count("kagari_upstream_usage_anomalies", field=field_name)
        if status == "ok" and not merged.is_exact:
            metrics.count("kagari_upstream_usage_anomalies", field="none")
        self.exchange.notes.update(
            node=way.answering.name,
            prefill_node=None if way.decode is None else way.first.name,
            attempts=len(self._attempts) + 1,
            path=PATH,
            cached_tokens=merged.usage.cached_tokens,
            completion_tokens=merged.usage.completion_tokens,
            finish="+".join(sorted(set(self.rewriter.finish_by_choice.values()))) or status,
            ttft_s=None if ttft_s is None else round(ttft_s, 4),
            served_s=round(time.monotonic() - self.exchange.started, 4),
        )


def _full(retry_after_s: float) -> GatewayError:
    return GatewayError(
        "capacity_exceeded",
        field="model",
        found="every upstream that serves it full",
        allowed="one with room",
        remedy="send the request again",
        retry_after_s=retry_after_s,
    )


def _none_up() -> GatewayError:
    return GatewayError(
        "no_node",
        field="model",
        found="no upstream that serves it and works",
        allowed="one that does",
        remedy="send the request again",
        retry_after_s=2.0,
    )
