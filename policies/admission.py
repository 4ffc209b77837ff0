"""Who may enter now: request rate and concurrency before any text work, then tokens in flight.

Decisions only: time comes in, a Ticket or a Shed comes out. A ticket is given back exactly once by
`leave`, whatever became of its request; giving it back again changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

ShedReason = Literal["rate", "key_concurrency", "concurrency", "tokens"]


class AdmissionLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one gateway; None means unbounded."""

    concurrent_requests: int = 1024
    concurrent_requests_per_key: int = 512
    requests_per_minute_per_key: int | None = None
    reserved_tokens: int | None = 16_000_000  # prompt exactly, output bounded, over all requests
    output_reserve_tokens: int = 4096  # most output tokens that one request reserves
    retry_after_s: float = 1.0  # advice when concurrency or tokens ran out


@dataclass(frozen=True, slots=True)
class Shed:
    """Not now: what ran out, its bound, and when to come back."""

    reason: ShedReason
    allowed: int
    retry_after_s: float


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted request; its reservation grows once, when the prompt's length is known."""

    key_id: str
    reserved_tokens: int = 0
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class RateView:
    """What the x-ratelimit-* headers tell: the bound, what is left, seconds until it is whole."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


@dataclass(slots=True)
class Admission:
    limits: AdmissionLimits
    in_flight: int = 0
    reserved_tokens: int = 0
    _in_flight_by_key: dict[str, int] = field(default_factory=dict)
    _bucket_by_key: dict[str, _Bucket] = field(default_factory=dict)

    def enter(self, key_id: str, now: float) -> Ticket | Shed:
        """Concurrency first: a refused request must not also cost the key its rate."""
        limits = self.limits
        if self.in_flight >= limits.concurrent_requests:
            return Shed("concurrency", limits.concurrent_requests, limits.retry_after_s)
        mine = self._in_flight_by_key.get(key_id, 0)
        if mine >= limits.concurrent_requests_per_key:
            return Shed("key_concurrency", limits.concurrent_requests_per_key, limits.retry_after_s)
        if limits.requests_per_minute_per_key is not None:
            wait_s = self._take(key_id, limits.requests_per_minute_per_key, now)
            if wait_s > 0:
                return Shed("rate", limits.requests_per_minute_per_key, wait_s)
        self.in_flight += 1
        self._in_flight_by_key[key_id] = mine + 1
        return Ticket(key_id)

    def reserve(
        self, ticket: Ticket, *, prompt_tokens: int, max_tokens: int, choices: int = 1
    ) -> Shed | None:
        """Reserve before work starts, so that parallel requests cannot all pass one check.

        A request larger than the whole bound enters when nothing else is reserved: a bound must
        slow big requests down, never shut them out. max_tokens is of each of its choices.
        """
        limits = self.limits
        tokens = prompt_tokens + choices * min(max_tokens, limits.output_reserve_tokens)
        if (
            limits.reserved_tokens is not None
            and self.reserved_tokens > ticket.reserved_tokens  # by others
            and self.reserved_tokens + tokens > limits.reserved_tokens
        ):
            return Shed("tokens", limits.reserved_tokens, limits.retry_after_s)
        ticket.reserved_tokens += tokens
        self.reserved_tokens += tokens
        return None

    def leave(self, ticket: Ticket) -> None:
        if not ticket.is_open:
            return
        ticket.is_open = False
        self.in_flight -= 1
        self.reserved_tokens -= ticket.reserved_tokens
        mine = self._in_flight_by_key[ticket.key_id] - 1
        if mine:
            self._in_flight_by_key[ticket.key_id] = mine
        else:
            del self._in_flight_by_key[ticket.key_id]

    def rate(self, key_id: str, now: float) -> RateView | None:
        """None when no request rate is set."""
        limit = self.limits.requests_per_minute_per_key
        if limit is None:
            return None
        bucket = self._bucket_by_key.get(key_id)
        level = float(limit) if bucket is None else _refilled(bucket, limit, now)
        return RateView(limit, int(level), (limit - level) * 60.0 / limit)

    def _take(self, key_id: str, per_minute: int, now: float) -> float:
        """0 when a request was taken from the bucket, else seconds until one is there."""
        bucket = self._bucket_by_key.get(key_id)
        if bucket is None:
            bucket = self._bucket_by_key[key_id] = _Bucket(float(per_minute), now)
        bucket.level = _refilled(bucket, per_minute, now)
        bucket.at = now
        if bucket.level >= 1.0:
            bucket.level -= 1.0
            return 0.0
        return (1.0 - bucket.level) * 60.0 / per_minute


def _refilled(bucket: _Bucket, per_minute: int, now: float) -> float:
    return min(float(per_minute), bucket.level + max(0.0, now - bucket.at) * per_minute / 60.0)
