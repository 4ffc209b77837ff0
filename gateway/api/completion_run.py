"""One completion between its dispatch and its settlement: counts, text, row, and the single end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from gateway.api.exchange import Exchange
from gateway.errors import GatewayError
from gateway.ledger.keys import Key
from gateway.ledger.rows import Attempt, Ending, OpenRow, Quality, Settlement
from gateway.nodes.streams import Burst, Stream
from gateway.services import Services
from gateway.text.output import OutputText
from policies.contract.wire import Finished, Usage
from policies.pricing import Rates, charge_nano_usd

DEADLINE_GRACE_S = 5.0  # the engine ends what is late; this is for when it cannot
PATH: Final = "mixed"  # how every request runs until prefill and decode can be split


@dataclass(slots=True)
class CompletionRun:
    services: Services
    exchange: Exchange
    stream: Stream
    output: OutputText
    model: str
    prompt_tokens: int
    rates: Rates
    created: int = field(default_factory=lambda: int(time.time()))
    reason: str | None = None  # stop or length, once the answer is complete
    completion_tokens: int = 0
    first_token_at: float | None = None
    is_open: bool = True
    _has_row: bool = False

    async def open_row(self, key: Key, *, session: bytes | None, deepest_key: bytes | None) -> None:
        """Returns when the row is committed; nothing is sent to the client before. LedgerFull."""
        self._has_row = True  # from here on it is settled, even if we are cancelled while waiting
        await self.services.ledger.open(
            OpenRow(
                request_id=self.exchange.request_id,
                tenant=key.tenant,
                key_id=key.key_id,
                model=self.model,
                path=PATH,
                prompt_tokens=self.prompt_tokens,
                rates=self.rates,
                price_version=self.services.prices.version,
                policy_version=self.services.policy_version,
                node=self.stream.node_id,
                started_at=time.time(),
                session_digest=self._salted(session),
                page_digest=self._salted(deepest_key),
            )
        )

    async def next(self, timeout_s: float | None = None) -> Burst | None:
        """The next burst, or None when timeout_s passed. Raises GatewayError past the deadline."""
        deadline_s = self.services.config.limits.request_deadline_s + DEADLINE_GRACE_S
        left_s = self.exchange.started + deadline_s - time.monotonic()
        wait_s = left_s if timeout_s is None else min(timeout_s, left_s)
        burst = await self.stream.next_within(wait_s)
        if burst is None:
            # Not by the clock: a loop's timer may ring a millisecond early.
            if timeout_s is not None and timeout_s < left_s:
                return None
            raise GatewayError(
                "deadline_exceeded",
                found=f"no end after {deadline_s:g} s",
                allowed=f"{deadline_s:g} s",
                remedy="ask for fewer tokens",
            )
        if burst.tokens and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        return burst

    def push(self, tokens: Sequence[int]) -> str:
        """Text that may be sent now. A stop string ends the stream here and at the node."""
        text = self.output.push(tokens)
        self.completion_tokens += len(tokens)
        stopped_at = self.output.stopped_at
        if stopped_at is not None and self.reason is None:
            self.completion_tokens = stopped_at
            self.reason = "stop"
            self.stream.finish(stopped_at)
        return text

    def finish(self, end: Finished) -> str:
        """The engine's own end: the rest of the text; its count of tokens is the one billed."""
        self.completion_tokens = end.usage.completion_tokens
        text = self.output.flush()
        if self.output.stopped_at is not None:
            self.completion_tokens = self.output.stopped_at
            self.reason = "stop"
        else:
            self.reason = end.reason
        return text

    def usage(self) -> Usage:
        cached = min(self.stream.cached_tokens or 0, self.prompt_tokens)
        return Usage(self.prompt_tokens, cached, self.completion_tokens)

    def cost_nano_usd(self) -> int:
        return charge_nano_usd(self.usage(), self.rates)

    def headers(self) -> list[tuple[str, str]]:
        """Where and how it runs, as far as it is known now."""
        info = self.stream.info
        headers = [
            ("x-kagari-region", self.services.config.region.name),
            ("x-kagari-node", self.stream.node_id),
            ("x-kagari-path", PATH),
            ("x-kagari-affinity", self.stream.affinity),
            ("x-kagari-precision", f"{info.weights_precision}/{info.kv_precision}"),
        ]
        if self.stream.cached_tokens is not None:
            headers.append(("x-kagari-cached-tokens", str(self.usage().cached_tokens)))
        return headers

    def close(self, *, client_left: bool) -> None:
        """Abort what still runs and settle. The first call counts; it never waits."""
        if not self.is_open:
            return
        self.is_open = False
        self.stream.abort()
        if self.reason is not None:
            status: Ending = "ok"
        else:
            status = "client_left" if client_left else "failed"
            self.completion_tokens = self.stream.produced
        ended = time.monotonic()
        ttft_s = (
            None if self.first_token_at is None else self.first_token_at - self.exchange.started
        )
        if self._has_row:
            self.services.ledger.settle(self._settlement(status, ttft_s))
        self._tell(status, ttft_s, ended)

    def discard(self) -> None:
        """The row was refused: stop the work, settle nothing."""
        self.is_open = False
        self.stream.abort()

    def _settlement(self, status: Ending, ttft_s: float | None) -> Settlement:
        usage = self.usage()
        quality: Quality = "exact" if status == "ok" else "partial"
        tried = self.stream.tried
        return Settlement(
            request_id=self.exchange.request_id,
            status=status,
            quality=quality,
            node=self.stream.node_id,
            prefill_node=None,
            path=PATH,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            tiers={self.stream.tier: usage.cached_tokens} if usage.cached_tokens else {},
            attempts=tuple(
                Attempt(number, node, "failed") for number, node in enumerate(tried[:-1], start=1)
            ),
            ended_at=time.time(),
            ttft_s=ttft_s,
        )

    def _tell(self, status: Ending, ttft_s: float | None, ended: float) -> None:
        usage = self.usage()
        metrics = self.services.metrics
        metrics.count("kagari_completions", model=self.model, outcome=status)
        metrics.count("kagari_prompt_tokens", usage.prompt_tokens, model=self.model)
        metrics.count("kagari_cached_tokens", usage.cached_tokens, model=self.model)
        metrics.count("kagari_completion_tokens", usage.completion_tokens, model=self.model)
        if ttft_s is not None:
            metrics.observe("kagari_ttft_seconds", ttft_s, model=self.model)
        self.exchange.notes.update(
            node=self.stream.node_id,
            attempts=self.stream.attempt,
            path=PATH,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            finish=self.reason or status,
            ttft_s=None if ttft_s is None else round(ttft_s, 4),
            queue_s=round(self.stream.queue_s, 4),
            served_s=round(ended - self.exchange.started, 4),
        )

    def _salted(self, digest: bytes | None) -> bytes | None:
        """Digests in the ledger are keyed by the home secret: rows alone identify nothing."""
        if digest is None:
            return None
        return blake2b(digest, digest_size=16, key=self.services.home.secret).digest()
