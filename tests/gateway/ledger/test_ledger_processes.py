"""The ledger against the system: a writer killed mid-batch, and a disk that is truly full."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.ledger.ledger import Ledger
from gateway.ledger.requests import requests
from gateway.ledger.usage import usage_by
from gateway.ledger.verify import verify

WRITER = """
import asyncio, sys, time
from pathlib import Path
from gateway.ledger.ledger import Ledger
from gateway.ledger.rows import LedgerFull, OpenRow, Settlement
from policies.pricing import Rates

path = Path(sys.argv[1])
RATES = Rates(20_000, 4_000, 40_000)

def row(i):
    return OpenRow(i, "default", "k", "m", "mixed", 100, RATES, "v", "1", "n1", time.time())

def end(i):
    return Settlement(i, "ok", "exact", "n1", None, "mixed", 64, 5, {}, (), time.time(), None)

def say(*words):
    print(*words, flush=True)
"""

KILLED = (
    WRITER
    + """
async def one(ledger, i):
    await ledger.open(row(f"r{i}"))
    say("open", f"r{i}")
    if i % 3 == 0:
        ledger.settle(end(f"r{i}"))

async def main():
    async with Ledger(path) as ledger:
        for start in range(0, 1_000_000, 8):
            await asyncio.gather(*(one(ledger, start + i) for i in range(8)))

asyncio.run(main())
"""
)

FULL = (
    WRITER
    + """
import resource

async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)

async def main():
    async with Ledger(path) as ledger:
        for i in range(20):
            await ledger.open(row(f"r{i}"))
        wal = path.with_name(path.name + "-wal")
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size, hard))
        for i in range(20):
            ledger.settle(end(f"r{i}"))
        await until(lambda: ledger.health().state == "full")
        refused = 0
        for i in range(20, 40):
            try:
                await ledger.open(row(f"r{i}"))
            except LedgerFull:
                refused += 1
            await asyncio.sleep(0.01)
        say("told", refused, ledger.health().unsettled, ledger.health().message)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        await until(lambda: ledger.health().state == "ok" and not ledger.health().unsettled)
        await ledger.open(row("last"))
        ledger.settle(end("last"))

asyncio.run(main())
"""
)


def spawn(script: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.anyio
async def test_a_writer_killed_mid_batch_loses_no_acknowledged_row(path):
    with spawn(KILLED, path) as writer:
        opened = [writer.stdout.readline().split()[1] for _ in range(400)]
        writer.kill()
        rest = writer.stdout.read().splitlines()
        writer.wait(timeout=10)
    opened += [line.split()[1] for line in rest if line.startswith("open r") and line[6:].isdigit()]
    found = verify(path)  # before any restart: only that its process is gone
    assert found.problem_count == found.open_rows > 0
    before = {line.request_id: line.status for line in requests(path)}
    assert set(opened) <= before.keys()
    assert "ok" in before.values()

    async with Ledger(path):
        after = {line.request_id: line.status for line in requests(path)}
        assert after == {
            request_id: "orphaned" if status == "open" else status
            for request_id, status in before.items()
        }
        found = verify(path)
        assert (found.problem_count, found.open_rows) == (0, 0)
        assert usage_by(path, ())[0].requests == len(after)


def test_a_disk_that_is_truly_full_refuses_and_then_loses_nothing(path):
    with spawn(FULL, path) as writer:
        out, _ = writer.communicate(timeout=60)
    assert writer.returncode == 0
    (told,) = (line for line in out.splitlines() if line.startswith("told "))  # others are logs
    _, refused, unsettled, why = told.split(maxsplit=3)
    assert (refused, unsettled) == ("20", "20")
    assert "free space on its disk" in why
    statuses = [(line.request_id, line.status) for line in requests(path)]
    assert statuses == [(f"r{i}", "ok") for i in range(20)] + [("last", "ok")]
    assert verify(path).problem_count == 0
