"""What handlers may use: built once in `gateway/app.py`, handed to each of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from gateway.api.body import BodyBudget
from gateway.api.idempotency import Idempotency
from gateway.cache.keeper import Keeper
from gateway.config import GatewayConfig
from gateway.home import Home
from gateway.ledger.keys import Keys
from gateway.ledger.ledger import Ledger
from gateway.ledger.reader import LedgerReader
from gateway.nodes.fleet import Fleet
from gateway.telemetry import Metrics
from gateway.upstreams.registry import Upstreams
from policies.admission import Admission
from policies.pricing import PriceTable


@dataclass(slots=True)
class Services:
    config: GatewayConfig
    home: Home
    fleet: Fleet
    keeper: Keeper
    ledger: Ledger
    ledger_reader: LedgerReader
    idempotency: Idempotency
    keys: Keys
    prices: PriceTable
    policy_version: str
    admission: Admission
    body_budget: BodyBudget
    metrics: Metrics
    log: FilteringBoundLogger
    upstreams: Upstreams | None = None  # None: none are configured
    started: bool = False  # every listener is up
    draining: asyncio.Event = field(default_factory=asyncio.Event)
