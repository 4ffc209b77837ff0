"""Money under any interleaving: leaving, failing, a cut link, a slow ledger, at random moments."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.ledger.files import LEDGER_NAME
from policies.contract.wire import Usage
from policies.pricing import Rates, charge_nano_usd


class SlowLedger:
    """The real one behind a disk that takes its time; counts what it is told."""

    def __init__(self, real: Any, waits_s: list[float]) -> None:
        self.real = real
        self.waits_s = waits_s
        self.settled: Counter[str] = Counter()

    async def open(self, row: Any) -> None:
        await self.real.open(row)
        await asyncio.sleep(self.waits_s.pop() if self.waits_s else 0)

    def settle(self, settlement: Any) -> None:
        self.settled[settlement.request_id] += 1
        self.real.settle(settlement)

    def health(self) -> Any:
        return self.real.health()


def script_of(dice: random.Random) -> dict[str, Any]:
    script: dict[str, Any] = {
        "say": "x" * dice.choice([0, 1, 5, 40]),
        "delay_s": dice.choice([0, 0.002, 0.01]),
        "first_s": dice.choice([0, 0, 0.05]),
        "step": dice.choice([1, 3]),
    }
    fate = dice.random()
    if fate < 0.25:
        script |= {"fail": "page_integrity", "fail_after": dice.choice([0, 1, 4])}
    elif fate < 0.45:
        script |= {"cut_after": dice.choice([0, 0, 2]), "cut_attempts": dice.choice([1, 2, 9])}
    return script


def visit(gateway: Any, seed: int) -> None:
    """One client: it may read all, or leave at any moment."""
    dice = random.Random(seed)
    body: dict[str, Any] = {"model": "tiny", "stream": dice.random() < 0.7}
    body["n"] = dice.choice([1, 1, 2, 3])
    if dice.random() < 0.7:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": json.dumps(script_of(dice))}]
    else:
        path = "/v1/completions"
        body["prompt"] = [json.dumps(script_of(dice)) for _ in range(dice.choice([1, 2, 9]))]
    patience_s = dice.choice([None, 0.01, 0.03, 0.1, 0.2])
    with gateway.connect() as sock:
        sock.settimeout(20 if patience_s is None else patience_s)
        data = json.dumps(body).encode()
        sock.sendall(gateway.raw(data, path=path, extra="Connection: close\r\n"))
        until = time.monotonic() + (20 if patience_s is None else patience_s)
        try:
            while time.monotonic() < until and sock.recv(4096):
                continue
        except (TimeoutError, ConnectionError):
            return


@pytest.mark.parametrize(
    ("first_seed", "visits"),
    [(1, 60), pytest.param(1000, 2000, marks=pytest.mark.slow)],
)
def test_every_request_is_billed_exactly_once(tmp_path, start, first_seed, visits) -> None:
    dice = random.Random(first_seed)
    with start(tmp_path, nodes=3) as running:
        ledger = SlowLedger(
            running.services.ledger,
            [dice.choice([0, 0, 0.01, 0.06]) for _ in range(visits)],
        )
        running.services.ledger = ledger
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(lambda seed: visit(running, seed), range(first_seed, first_seed + visits))
            )
        running.wait_idle(10)
        running.services.ledger = ledger.real
        metrics = httpx.get(running.addresses.admin_url + "/metrics", trust_env=False).text
        connection = sqlite3.connect(running.services.home.folder / LEDGER_NAME)
        connection.row_factory = sqlite3.Row
        rows = connection.execute("SELECT * FROM requests").fetchall()
        connection.close()
        sent: Counter[str] = Counter()
        submitted: set[str] = set()
        for node in running.nodes.values():
            for served in node.served:
                request_id = served.submit.request_id.partition(".")[0]  # then a prompt's number
                submitted.add(request_id)
                sent[request_id] += served.sent
    assert {row["request_id"] for row in rows} >= submitted
    assert len(rows) == len({row["request_id"] for row in rows}) == len(ledger.settled)
    assert set(ledger.settled.values()) == {1}
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        counter = f'kagari_{name}_total{{model="tiny"}} {float(sum(row[name] for row in rows))}'
        assert counter in metrics.splitlines()
    statuses = Counter(row["status"] for row in rows)
    assert set(statuses) == {"ok", "failed", "client_left"}, statuses
    for row in rows:
        rates = Rates(row["rate_input"], row["rate_cached"], row["rate_output"])
        told = Usage(row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
        assert row["charge_nano_usd"] == charge_nano_usd(told, rates)
        assert row["completion_tokens"] <= sent[row["request_id"]]
        if row["status"] == "failed":
            assert (told, row["charge_nano_usd"]) == (Usage(), 0)
        else:
            assert row["prompt_tokens"] > 0
            assert row["charge_nano_usd"] > 0
