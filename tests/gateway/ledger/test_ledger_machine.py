"""Any order of opens, settlements, full disks, crashes and restarts bills each request once."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gateway.ledger.ledger import Ledger
from gateway.ledger.requests import requests
from gateway.ledger.rows import LedgerFull
from gateway.ledger.verify import verify
from policies.contract.wire import Usage
from policies.pricing import charge_nano_usd

STATUSES = ("ok", "client_left", "failed")


class Machine(RuleBasedStateMachine):
    """Model: what each acknowledged request must end as; None while no settle() was called."""

    folder = new_disk = make_row = make_end = None  # set by the test

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir=self.folder)) / "ledger.sqlite3"
        self.wanted: dict[str, tuple[str, int, int] | None] = {}
        self.may_be_lost: set[str] = set()  # settled in memory when a process died
        self.count = 0
        self.start()

    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.disk = self.new_disk()
        self.ledger = Ledger(self.path, connect=self.disk.connect)
        self.runner.run(self.ledger.__aenter__())

    @rule(rows=st.integers(1, 6))
    def open(self, rows: int) -> None:
        ids = [f"r{self.count + i}" for i in range(rows)]
        self.count += rows

        async def open_all():
            opens = [self.ledger.open(self.make_row(i)) for i in ids]
            return await asyncio.gather(*opens, return_exceptions=True)

        for request_id, outcome in zip(ids, self.runner.run(open_all()), strict=True):
            if outcome is None:
                self.wanted[request_id] = None
            else:
                assert isinstance(outcome, LedgerFull)
                assert self.disk.fails_at or self.ledger.health().state == "full"
        if self.disk.fails_at is not None:
            assert not any(request_id in self.wanted for request_id in ids)

    def open_ids(self) -> list[str]:
        return [request_id for request_id, end in self.wanted.items() if end is None]

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data(), status=st.sampled_from(STATUSES), completion=st.integers(0, 50))
    def settle(self, data: st.DataObject, status: str, completion: int) -> None:
        request_id = data.draw(st.sampled_from(self.open_ids()))
        cached = data.draw(st.integers(0, 1000))
        self.wanted[request_id] = (status, cached, completion)
        self.tell(request_id, status, cached, completion)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        done = [request_id for request_id, end in self.wanted.items() if end is not None]
        if done:
            self.tell(data.draw(st.sampled_from(done)), "ok", 1, 1)

    @rule()
    def settle_unknown(self) -> None:
        self.tell("nobody", "ok", 1, 1)

    def tell(self, request_id: str, status: str, cached: int, completion: int) -> None:
        async def settle() -> None:
            self.ledger.settle(
                self.make_end(request_id, status, cached=cached, completion=completion)
            )

        self.runner.run(settle())

    @rule(at=st.sampled_from(["row", "commit"]))
    def fill_disk(self, at: str) -> None:
        self.disk.fails_at = at

    @rule()
    def free_disk(self) -> None:
        self.disk.fails_at = None
        self.drain()

    def drain(self) -> None:
        async def drained() -> None:
            async with asyncio.timeout(10):
                while self.ledger.health().unsettled or self.ledger.health().state != "ok":  # noqa: ASYNC110
                    await asyncio.sleep(0.003)

        self.runner.run(drained())

    @rule()
    def crash(self) -> None:
        """The process dies: its loop goes away and with it all that was only in memory."""
        unsettled = self.ledger.health().unsettled
        if unsettled:
            self.may_be_lost |= {i for i, end in self.wanted.items() if end is not None}
        self.runner.close()
        self.orphan_the_open()
        self.start()

    @precondition(lambda self: self.disk.fails_at is None)
    @rule()
    def restart(self) -> None:
        self.runner.run(self.ledger.close())
        self.runner.close()
        self.orphan_the_open()
        self.start()

    def orphan_the_open(self) -> None:
        for request_id in self.open_ids():
            self.wanted[request_id] = ("orphaned", 0, 0)

    @invariant()
    def the_ledger_balances(self) -> None:
        found = verify(self.path)
        assert found.problems == ()

    @invariant()
    def each_acknowledged_request_is_there_once_and_nothing_is_lost(self) -> None:
        waiting = self.ledger.health().unsettled  # first: a commit may be under way in its thread
        lines = list(requests(self.path))
        assert {line.request_id for line in lines} == set(self.wanted)
        assert len(lines) == len(self.wanted)
        settled = sum(line.status != "open" for line in lines)
        opened = sum(end is None for end in self.wanted.values())
        assert settled + waiting + opened >= len(self.wanted)

    def teardown(self) -> None:
        self.disk.fails_at = None
        self.runner.run(self.ledger.close())
        self.runner.close()
        self.orphan_the_open()
        for line in requests(self.path):
            status, cached, completion = self.wanted[line.request_id]
            if line.request_id in self.may_be_lost and line.status == "orphaned":
                status = "orphaned"
            assert line.status == status
            billed = Usage(1000, cached, completion)
            if status not in ("ok", "client_left"):
                billed = Usage()
            assert line.charge_nano_usd == charge_nano_usd(billed, line.rates)
        assert verify(self.path).problem_count == 0


@pytest.fixture
def machine(tmp_path, new_disk, row, end):
    class Bound(Machine):
        pass

    Bound.folder = tmp_path
    Bound.new_disk = staticmethod(new_disk)
    Bound.make_row = staticmethod(row)
    Bound.make_end = staticmethod(end)
    return Bound


def run(machine, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_request_is_billed_exactly_once(machine):
    run(machine, 40, 25)


@pytest.mark.slow
def test_every_request_is_billed_exactly_once_at_length(machine):
    run(machine, 600, 50)
