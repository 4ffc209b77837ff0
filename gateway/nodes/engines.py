"""One engine of a node as the gateway knows it: what it serves, its load, its pages, credits, and
what waits for it here."""

from __future__ import annotations

from gateway.nodes.legs import Leg
from gateway.nodes.queued import Queued
from gateway.nodes.streams import Flow
from policies.backlog import Backlog
from policies.contract.wire import EngineInfo, EngineReport, Tier
from policies.queue import FairQueue, QueueBounds, Window
from policies.residency import Residency

# A page may be expected before its event comes and lie in a slower tier too.
KEYS_PER_PAGE = 4
MAX_KEYS = 2_000_000


class Engine:
    """Its backlog, its pages and its last report, in one of its lives.

    queue: flows that were placed here and not sent yet; has_changed: its backlog may be less than
    when the queue was last asked.
    """

    def __init__(self, info: EngineInfo, bounds: QueueBounds) -> None:
        self.info = info
        self.report: EngineReport | None = None
        slower = sum([pages for _, pages in info.tier_pages])
        most = max(1, info.num_pages) * KEYS_PER_PAGE + slower
        self.residency = Residency(min(MAX_KEYS, most))
        self.resync_asked = False
        self.seated_tokens = 0  # ours: prompts of flows that have not ended
        self.backlog = Backlog()
        self.window = Window(self.backlog, info.step_tokens)
        self.queue: FairQueue[Queued] = FairQueue(info.step_tokens, bounds)
        self.has_changed = False

    @property
    def ready(self) -> bool:
        """By its last report; one that has not reported yet came up to be announced."""
        return self.report is None or self.report.state == "ready"

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
    def kv_share(self) -> float:
        """Of its device pages, those in use by the last report."""
        report = self.report
        return report.pages_held / report.pages_total if report and report.pages_total else 0.0

    @property
    def fetch_rates(self) -> dict[Tier, float]:
        """Bytes per second of each slower tier that works; 0: not measured yet."""
        tiers = self.report.tiers if self.report is not None else ()
        return {one.tier: one.fetch_bytes_per_s for one in tiers if one.state == "ok"}

    def take_report(self, report: EngineReport, now: float) -> None:
        self.report = report
        self.backlog.take_report(report.uncached_tokens, report.step)
        self.window.reported(now)
        self.has_changed = True

    def credit(self, flow: Flow | Leg, tokens: int) -> None:
        """Count a flow's uncached tokens as sent here."""
        flow.engine = self
        flow.credit = credit = self.backlog.open(tokens)
        self.window.sent(credit)

    def enqueue(self, flow: Flow | Leg, tokens: int) -> None:
        """Count them as work here that is not sent yet."""
        flow.engine = self
        flow.credit = self.backlog.enqueue(tokens)

    def resize_queued(self, flow: Flow | Leg, tokens: int) -> None:
        """What is to be computed of it is known better now."""
        assert flow.credit is not None  # it is queued here
        self.backlog.resize(flow.credit, tokens)

    def send_queued(self, flow: Flow | Leg) -> None:
        """Its turn came."""
        assert flow.credit is not None  # as above
        self.backlog.send(flow.credit)
        self.window.sent(flow.credit)

    def seat(self, flow: Flow) -> None:
        """The flow's context lies here until it leaves."""
        flow.seated_tokens = len(flow.dispatch.prompt)
        self.seated_tokens += flow.seated_tokens

    def leave(self, flow: Flow) -> None:
        """The flow ended, or goes elsewhere. Idempotent."""
        self.release(flow)
        self.seated_tokens -= flow.seated_tokens
        flow.seated_tokens = 0

    def advance(self, flow: Flow | Leg, computed_tokens: int, step: int) -> None:
        """A step computed a part of the flow's prompt."""
        if flow.credit is not None:
            self.backlog.advance(flow.credit, len(flow.dispatch.prompt) - computed_tokens, step)
            self.has_changed = True

    def computed(self, flow: Flow, step: int) -> None:
        """The flow's first token came: Started comes after a chunk, this after the whole prompt."""
        if flow.credit is not None:
            self.backlog.answer(flow.credit, step)
            self.has_changed = True
        self.residency.expect(flow.keys)

    def release(self, flow: Flow | Leg) -> None:
        """Its prompt is no work here now. Idempotent."""
        if flow.credit is not None:
            self.backlog.close(flow.credit)
            self.has_changed = True
