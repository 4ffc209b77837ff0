"""One JSON line a request, and one table of metrics.

Neither ever holds a key, a prompt or an answer: the line's fields are named one by one here, and
whatever looks like a secret is replaced before it is written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TextIO

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from structlog.typing import FilteringBoundLogger, Processor

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class MetricRow:
    """name without the suffix that Prometheus adds; unit is part of the name."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


PAGES = ("node", "model", "tier")
METRICS = (
    MetricRow("kagari_requests", "counter", "requests", ("route", "status"), "Answered requests."),
    MetricRow("kagari_errors", "counter", "errors", ("code",), "Refusals and faults by code."),
    MetricRow("kagari_completions", "counter", "requests", ("model", "outcome"), "How they ended."),
    MetricRow("kagari_paths", "counter", "requests", ("model", "path"), "How they ran."),
    MetricRow(
        "kagari_split",
        "counter",
        "attempts",
        ("outcome",),
        "Attempts by a pair: ok, retried (by a pair again), local, failed, left.",
    ),
    MetricRow("kagari_split_failures", "counter", "attempts", ("code",), "Why a pair failed."),
    MetricRow("kagari_affinity", "counter", "requests", ("outcome",), "Where sessions were sent."),
    MetricRow(
        "kagari_affinity_ignored", "counter", "signals", ("source",), "Signals outside the limits."
    ),
    MetricRow(
        "kagari_idempotent_requests",
        "counter",
        "requests",
        ("outcome",),
        "Requests with an Idempotency-Key: first, joined, replayed, refused.",
    ),
    MetricRow("kagari_prompt_tokens", "counter", "tokens", ("model",), "Prompt tokens billed."),
    MetricRow(
        "kagari_cached_tokens",
        "counter",
        "tokens",
        ("model",),
        "Billed prompt tokens that were reused.",
    ),
    MetricRow(
        "kagari_cached_tier_tokens",
        "counter",
        "tokens",
        ("model", "tier"),
        "The same by the tier that held them.",
    ),
    MetricRow("kagari_completion_tokens", "counter", "tokens", ("model",), "Tokens billed."),
    MetricRow("kagari_requests_in_flight", "gauge", "requests", (), "Admitted, not ended."),
    MetricRow("kagari_reserved_tokens", "gauge", "tokens", (), "Tokens reserved by admission."),
    MetricRow("kagari_nodes", "gauge", "nodes", ("state",), "Nodes by state."),
    MetricRow("kagari_node_roles", "gauge", "nodes", ("role",), "Ready nodes by role."),
    MetricRow("kagari_tier_pages_used", "gauge", "pages", PAGES, "Pages that a tier holds."),
    MetricRow("kagari_tier_pages_capacity", "gauge", "pages", PAGES, "It can hold; 0: unknown."),
    MetricRow("kagari_tier_working", "gauge", "bool", PAGES, "1, or 0: scanning or broken."),
    MetricRow("kagari_tier_fetch_bytes_per_second", "gauge", "bytes/s", PAGES, "As measured."),
    MetricRow("kagari_tier_hit_pages", "counter", "pages", PAGES, "Fetched to the device."),
    MetricRow("kagari_tier_miss_pages", "counter", "pages", PAGES, "Asked for, not there."),
    MetricRow("kagari_tier_stored_pages", "counter", "pages", PAGES, "Taken in."),
    MetricRow("kagari_tier_evicted_pages", "counter", "pages", PAGES, "Given up for others."),
    MetricRow("kagari_tier_dropped_pages", "counter", "pages", PAGES, "Not taken in: full."),
    MetricRow("kagari_tier_corrupt_pages", "counter", "pages", PAGES, "Refused by checksum."),
    MetricRow("kagari_tier_timeouts", "counter", "calls", PAGES, "Calls past their deadline."),
    MetricRow("kagari_tier_charged_pages", "counter", "pages", PAGES, "Evicted over a quota."),
    MetricRow(
        "kagari_quota_breaches",
        "counter",
        "pages",
        ("node", "model"),
        "Of the device, within a quota, and needed by others.",
    ),
    MetricRow("kagari_pages_pinned", "gauge", "pages", ("node", "model"), "Held by prefixes."),
    MetricRow(
        "kagari_integrity_faults",
        "counter",
        "faults",
        ("node", "model"),
        "Pages with a wrong tag; each ended one sequence.",
    ),
    MetricRow("kagari_upstreams", "gauge", "servers", ("state",), "Foreign servers by state."),
    MetricRow(
        "kagari_upstream_in_flight", "gauge", "requests", ("upstream",), "On a foreign server."
    ),
    MetricRow(
        "kagari_upstream_resident_pages",
        "gauge",
        "pages",
        ("upstream",),
        "That a foreign server is told or believed to hold.",
    ),
    MetricRow(
        "kagari_upstream_requests",
        "counter",
        "requests",
        ("upstream", "outcome"),
        "Relayed requests, how they ended.",
    ),
    MetricRow(
        "kagari_upstream_retries",
        "counter",
        "attempts",
        ("upstream",),
        "Attempts after a failed one, by where they went.",
    ),
    MetricRow(
        "kagari_upstream_usage_anomalies",
        "counter",
        "requests",
        ("field",),
        "Usage that cannot be as it was told; none: nothing was told.",
    ),
    MetricRow("kagari_ledger_open_rows", "gauge", "rows", (), "Ledger rows not yet settled."),
    MetricRow(
        "kagari_queued_requests",
        "gauge",
        "requests",
        ("node", "model"),
        "Placed on an engine, not sent yet.",
    ),
    MetricRow(
        "kagari_queued_tokens", "gauge", "tokens", ("node", "model"), "Their uncached tokens."
    ),
    MetricRow(
        "kagari_queue_sheds",
        "counter",
        "requests",
        ("reason",),
        "Given up before they were sent: full, ttft, ttft_queued, deadline.",
    ),
    MetricRow(
        "kagari_queue_seconds", "histogram", "s", ("model",), "In the gateway's queue.", SECONDS
    ),
    MetricRow("kagari_ttft_seconds", "histogram", "s", ("model",), "To the first token.", SECONDS),
    MetricRow("kagari_request_seconds", "histogram", "s", ("route",), "Whole requests.", SECONDS),
)


class Metrics:
    """The table, alive, in a registry of its own so that several gateways fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._counter_by_labels: dict[tuple[str, ...], Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._histogram_by_labels: dict[tuple[str, ...], Histogram] = {}
        self._reached: dict[tuple[str, ...], float] = {}
        for row in METRICS:
            if row.kind == "counter":
                self._counters[row.name] = Counter(
                    row.name, row.help, row.labels, registry=self.registry
                )
            elif row.kind == "gauge":
                self._gauges[row.name] = Gauge(
                    row.name, row.help, row.labels, registry=self.registry
                )
            else:
                self._histograms[row.name] = Histogram(
                    row.name, row.help, row.labels, registry=self.registry, buckets=row.buckets
                )

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        key = (name, *labels.values())
        counter = self._counter_by_labels.get(key)
        if counter is None:  # the library's own look-up costs ten times ours
            counter = self._counters[name]
            counter = counter.labels(**labels) if labels else counter
            self._counter_by_labels[key] = counter
        counter.inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        key = (name, *labels.values())
        histogram = self._histogram_by_labels.get(key)
        if histogram is None:
            histogram = self._histograms[name]
            histogram = histogram.labels(**labels) if labels else histogram
            self._histogram_by_labels[key] = histogram
        histogram.observe(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def clear(self, name: str) -> None:
        """Forget all labels of a gauge: what is not set again is gone."""
        self._gauges[name].clear()

    def reach(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter by what another's own count grew since the last call; a smaller total
        means that the other began anew."""
        key = (name, *labels.values())
        before = self._reached.get(key, 0.0)
        self._reached[key] = total
        self.count(name, total - before if total >= before else total, **labels)

    def text(self) -> bytes:
        return generate_latest(self.registry)


_SECRET_NAME = re.compile(r"authorization|api[_-]?key|token$|secret|password|cookie", re.I)
_SECRET_TEXT = re.compile(r"(?i)(bearer\s+\S+|\b(?:sk|kg)-[\w-]{8,})")
REDACTED = "[redacted]"


def redact(_logger: object, _method: str, event: MutableMapping[str, object]) -> dict[str, object]:
    """Replace what looks like a secret, by its name or by its shape."""
    return {
        name: REDACTED
        if _names_a_secret(name)
        else _SECRET_TEXT.sub(REDACTED, value)
        if isinstance(value, str) and not value.isalnum()  # a secret's shape has a dash or a space
        else value
        for name, value in event.items()
    }


@lru_cache(512)
def _names_a_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _render(_logger: object, _method: str, event: MutableMapping[str, object]) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


class LineLogger:
    """What structlog writes to: loses lines rather than fail whoever logs, and says how many.

    Standard error is often a file on the very disk that is full, and then the ledger's writer is
    the one who logs.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost_lines = 0

    def msg(self, line: str) -> None:
        try:
            if self.lost_lines:
                lost = {"event": "log_lines_lost", "lines": self.lost_lines, "level": "warning"}
                self._write(msgspec.json.encode(lost).decode())
                self.lost_lines = 0
            self._write(line)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.lost_lines += 1

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    debug = info = warning = error = exception = critical = msg


def log_to_stderr() -> None:
    """Send every structlog line of this process to standard error as JSON, redacted."""
    logger = LineLogger(sys.stderr)
    structlog.configure(
        logger_factory=lambda *_: logger,
        processors=PROCESSORS,
        wrapper_class=structlog.make_filtering_bound_logger(20),
        cache_logger_on_first_use=True,
    )


def make_log(stream: TextIO) -> FilteringBoundLogger:
    """A logger of such lines on any stream."""
    log: FilteringBoundLogger = structlog.wrap_logger(
        LineLogger(stream),
        processors=PROCESSORS,
        wrapper_class=structlog.make_filtering_bound_logger(20),
    )
    return log


PROCESSORS: list[Processor] = [
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.add_log_level,
    structlog.processors.format_exc_info,
    redact,
    _render,
]
