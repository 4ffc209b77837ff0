"""One engine of a node as the gateway knows it: what it serves, its load, its pages, credits."""

from __future__ import annotations

from gateway.nodes.legs import Leg
from gateway.nodes.streams import Flow
from policies.contract.wire import EngineInfo, EngineReport, Tier
from policies.residency import Residency

# A page may be expected before its event comes and lie in a slower tier too.
KEYS_PER_PAGE = 4
MAX_KEYS = 2_000_000


class Engine:
    """The load book counts uncached prompt tokens of streams that await their first token here.

    A report knows other gateways' work too, but is up to a second old: the backlog is the greater
    of our own book and of what was reported corrected by what we did since.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.report: EngineReport | None = None
        slower = sum([pages for _, pages in info.tier_pages])
        most = max(1, info.num_pages) * KEYS_PER_PAGE + slower
        self.residency = Residency(min(MAX_KEYS, most))
        self.resync_asked = False
        self.outstanding_tokens = 0  # ours, without a first token
        self.seated_tokens = 0  # ours: prompts of flows that have not ended
        self._reports = 0
        self._reported_tokens = 0  # by the last report, less ours that were answered since
        self._fresh_tokens = 0  # ours, sent since the last report, without a first token

    @property
    def ready(self) -> bool:
        """By its last report; one that has not reported yet came up to be announced."""
        return self.report is None or self.report.state == "ready"

    @property
    def backlog_tokens(self) -> int:
        return max(self.outstanding_tokens, self._reported_tokens + self._fresh_tokens)

    @property
    def capacity_tokens(self) -> int:
        return self.info.num_pages * self.info.page_size

    @property
    def context_tokens(self) -> int:
        """Of what is in use in its pages: the greater of our own book and of what was reported."""
        held = self.report.pages_held * self.info.page_size if self.report is not None else 0
        return max(self.seated_tokens, held)

    @property
    def tokens_per_s(self) -> float:
        """Measured prefill rate, tokens per second; 0 when unknown."""
        reported = self.report.prefill_tokens_per_s if self.report is not None else 0.0
        return reported or self.info.prefill_tokens_per_s

    @property
    def fetch_rates(self) -> dict[Tier, float]:
        """Bytes per second of each slower tier that works; 0: not measured yet."""
        tiers = self.report.tiers if self.report is not None else ()
        return {one.tier: one.fetch_bytes_per_s for one in tiers if one.state == "ok"}

    def take_report(self, report: EngineReport) -> None:
        self.report = report
        self._reports += 1
        self._reported_tokens = report.uncached_tokens
        self._fresh_tokens = 0

    def credit(self, flow: Flow | Leg, tokens: int) -> None:
        """Count a flow's uncached tokens as sent here."""
        flow.engine = self
        flow.credit = tokens
        flow.credit_report = self._reports
        self.outstanding_tokens += tokens
        self._fresh_tokens += tokens

    def seat(self, flow: Flow) -> None:
        """The flow's context lies here until it leaves."""
        flow.seated_tokens = len(flow.dispatch.prompt)
        self.seated_tokens += flow.seated_tokens

    def leave(self, flow: Flow) -> None:
        """The flow ended, or goes elsewhere. Idempotent."""
        self.release(flow)
        self.seated_tokens -= flow.seated_tokens
        flow.seated_tokens = 0

    def computed(self, flow: Flow | Leg) -> None:
        """The flow's first token came: Started comes after a chunk, this after the whole prompt."""
        self.release(flow)
        self.residency.expect(flow.keys)

    def release(self, flow: Flow | Leg) -> None:
        """The flow's prompt is no work now: it was computed, or the flow ended. Idempotent."""
        tokens, flow.credit = flow.credit, 0
        if tokens == 0:
            return
        self.outstanding_tokens -= tokens
        if flow.credit_report == self._reports:
            self._fresh_tokens -= tokens
        else:
            self._reported_tokens = max(0, self._reported_tokens - tokens)
