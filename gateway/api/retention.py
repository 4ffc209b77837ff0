"""How long a client asks that its prompt stays in the cache: a hint, never a promise.

Only what is asked for explicitly counts. Of several hints the longest does; one beyond the
configured limit is clipped, and that is told.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from gateway.config import LimitsConfig
from gateway.errors import GatewayError, quote

# OpenAI's own reference has spelled the first both ways.
SECONDS_BY_RETENTION = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86_400.0}
SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TTL = re.compile(r"([0-9]{1,9})([smhd])")


class CacheOptions(Struct, frozen=True):
    ttl: str | None = None


class Hints(Protocol):
    """The fields of a body that say it."""

    @property
    def prompt_cache_retention(self) -> str | None: ...
    @property
    def prompt_cache_options(self) -> CacheOptions | None: ...
    @property
    def retention_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Retention:
    """seconds: None without a hint. changed: what was clipped."""

    seconds: float | None = None
    changed: str | None = None

    def headers(self) -> list[tuple[str, str]]:
        return [] if self.changed is None else [("x-kagari-changed", self.changed)]


NO_RETENTION = Retention()


def read_retention(body: Hints, limits: LimitsConfig) -> Retention:
    """Raises GatewayError (400) that names the field."""
    options = body.prompt_cache_options
    asked = max(
        _own(body.retention_s),
        _ttl(None if options is None else options.ttl),
        _named(body.prompt_cache_retention),
    )
    if asked == 0.0:
        return NO_RETENTION
    allowed = min(asked, limits.retention_s)
    changed = None if allowed == asked else f"retention_s {asked:.10g} -> {allowed:.10g}"
    return Retention(allowed or None, changed)


def _own(seconds: float | None) -> float:
    if seconds is None:
        return 0.0
    if not (math.isfinite(seconds) and seconds >= 0.0):
        raise _invalid("retention_s", f"{seconds:g}", "seconds, 0 or more")
    return seconds


def _ttl(ttl: str | None) -> float:
    if ttl is None:
        return 0.0
    match = _TTL.fullmatch(ttl)
    if match is None:
        allowed = 'a whole number and s, m, h or d, such as "30m"'
        raise _invalid("prompt_cache_options.ttl", quote(ttl), allowed)
    return float(int(match[1]) * SECONDS_BY_UNIT[match[2]])


def _named(retention: str | None) -> float:
    if retention is None:
        return 0.0
    if retention not in SECONDS_BY_RETENTION:
        raise _invalid("prompt_cache_retention", quote(retention), '"in_memory" or "24h"')
    return SECONDS_BY_RETENTION[retention]


def _invalid(field: str, found: str, allowed: str) -> GatewayError:
    remedy = "choose such a value, or leave it out"
    return GatewayError("invalid_request", field=field, found=found, allowed=allowed, remedy=remedy)
