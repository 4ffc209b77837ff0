"""What may happen to a connection, at each message of a transfer, one table for all of it.

All of it happens at once, beside a transfer that nothing happens to: whatever becomes of one, both
its sides end quiet, what arrived is right, and the undisturbed one is not disturbed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from engine.schedule.transfer_orders import Accepted, Arrived, HandedOver, Received, TransferQuiet
from tests.engine.transfer.movers import HANDOVER, LAYOUT, Split, Station, until
from tests.engine.transfer.relay import Deed, Judge, Relay

MESSAGES = (
    ("Hello", 0),
    ("Challenge", 0),
    ("Offer", 0),
    ("Accept", 0),
    ("Pages", 0),
    ("Pages", 1),
    ("Ack", 0),
    ("Ack", 1),
    ("HandOver", 0),
    ("Done", 0),
)
DEEDS: tuple[Deed, ...] = ("cut", "stall", "lose", "repeat", "alter", "truncate", "slow")
# What the sides may be told of it. A cut handshake is tried again; a lost or stalled message ends
# in silence or in the seal's next, wrong number.
CODES: dict[Deed, set[str]] = {
    "cut": {"transfer_lost"},
    "stall": {"transfer_timeout", "transfer_lost"},
    "lose": {"transfer_timeout", "transfer_corrupt", "transfer_lost"},
    "repeat": {"transfer_corrupt", "transfer_lost"},
    "alter": {"transfer_corrupt", "transfer_lost", "transfer_refused", "transfer_timeout"},
    "truncate": {"transfer_lost"},
    "slow": set(),
}
CASES = [(name, nth, deed) for name, nth in MESSAGES for deed in DEEDS]
HANDSHAKE = ("Hello", "Challenge", "Offer")  # without it a receiver waits for its deadline
LONG_S = 60.0
DEADLINE_S = 5.0  # of a message that was lost while both sides go on saying that they live


def judge(name: str, nth: int, deed: Deed) -> Judge:
    return lambda frame: deed if (frame.name, frame.nth) == (name, nth) else "pass"


class Table:
    """All cases, run at once."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        num_pages = 8 + 4 * (len(CASES) + 1)
        self.sender = Station(num_pages=num_pages, seed=1, ways=ways)
        self.receiver = Station(num_pages=num_pages, seed=2, ways=ways)
        self.relay = Relay(self.receiver.mover.address, LAYOUT.page_bytes)
        self.splits: dict[tuple[str, int, Deed] | None, Split] = {}
        for at, case in enumerate((None, *CASES)):
            split = self.splits[case] = Split(
                self.sender,
                self.receiver,
                into=8 + 4 * at,
                within_s=DEADLINE_S if case is not None and case[2] != "slow" else LONG_S,
            )
            if case is not None:
                self.relay.judges[split.id] = judge(*case)
            self.receiver.give(split.imported)
            self.sender.give(replace(split.export, peer=self.relay.address))
        # Pages in two messages: the second is given when the first is there, or never will be.
        waiting = list(self.splits.values())
        given: set[bytes] = set()

        def go_on() -> bool:
            for split in list(waiting):
                told = self.sender.of(split.id)
                if split.id not in given and Accepted(split.id, 1) in told:
                    given.add(split.id)
                    self.sender.give(split.send(1, 3))
                if TransferQuiet(split.id) in told:
                    waiting.remove(split)
                elif split.id in given and split.positions(self.receiver, Arrived):
                    self.sender.give(split.send(3, 4), split.last)
                    waiting.remove(split)
            return not waiting

        until(go_on, within_s=2 * LONG_S)
        until(lambda: all(map(self.is_over, self.splits.values())), within_s=2 * LONG_S)
        self.lent = self.sender.pages.lent, self.receiver.pages.lent
        self.relay.close()
        self.sender.mover.close(1.0)
        self.receiver.mover.close(1.0)

    def is_over(self, split: Split) -> bool:
        quiet = TransferQuiet(split.id)
        return all(quiet in side.of(split.id) for side in (self.sender, self.receiver))


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    """Both at once: most of their time is silence."""
    with ThreadPoolExecutor() as both:
        tcp, shm = both.submit(Table, ()), both.submit(Table, ("shm",))
        return {"tcp": tcp.result(), "shm": shm.result()}


@pytest.fixture
def table(tables: dict[str, Table], request: pytest.FixtureRequest) -> Table:
    return tables[request.param]


WAYS = pytest.mark.parametrize("table", ["tcp", "shm"], indirect=True)


@WAYS
@pytest.mark.parametrize(("name", "nth", "deed"), CASES)
def test_each_fault_ends_quiet_and_no_byte_is_wrong(
    table: Table, name: str, nth: int, deed: Deed
) -> None:
    split = table.splits[name, nth, deed]
    split.arrived_right()
    is_received = Received(split.id, HANDOVER) in table.receiver.of(split.id)
    for side in (table.sender, table.receiver):
        told = side.of(split.id)
        assert told[-1] == TransferQuiet(split.id)
        assert told.count(TransferQuiet(split.id)) == 1
        failure = side.failure(split.id)
        if side is table.receiver and name in HANDSHAKE and deed != "slow":
            assert failure is None or failure.code in CODES[deed] | {"transfer_timeout"}
        elif failure is not None:
            assert failure.code in CODES[deed]
    if HandedOver(split.id) in table.sender.of(split.id):
        assert is_received
    if is_received:
        assert split.positions(table.receiver, Arrived) == [1, 2, 3, 4]
    else:
        assert table.receiver.failure(split.id) is not None
    if deed == "slow":
        assert HandedOver(split.id) in table.sender.of(split.id)


@WAYS
def test_nobody_else_is_disturbed(table: Table) -> None:
    split = table.splits[None]
    assert HandedOver(split.id) in table.sender.of(split.id)
    assert Received(split.id, HANDOVER) in table.receiver.of(split.id)
    split.arrived_right()
    assert table.lent == (0, 0)
