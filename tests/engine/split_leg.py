"""One side of a split on a scheduler of its own."""

from __future__ import annotations

from array import array

import msgspec

from engine.schedule.pages import HoldKind
from engine.schedule.sequence import NewSequence
from engine.schedule.transfer_orders import Import, TransferOrder
from policies.contract.wire import Role, Sampling, Transfer
from tests.engine.scheduler_bench import ROOT, Bench, ids

ID, HOME = b"t" * 16, b"h" * 16
TRANSFER = Transfer(ID, b"s" * 32, "peer:1", HOME, b"r" * 32)
OTHER = msgspec.structs.replace(TRANSFER, transfer_id=b"u" * 16, return_id=b"v" * 16)
PROMPT = ids(10)  # two pages and a half


class Leg(Bench):
    """One side alone; the test plays its mover."""

    def leg(
        self,
        role: Role,
        prompt: array[int] = PROMPT,
        *,
        sequence_id: int = 1,
        transfer: Transfer = TRANSFER,
        **sampling: int,
    ) -> None:
        asked = Sampling(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
        new = NewSequence(
            sequence_id, prompt, ROOT, asked, owner=ROOT[:16], role=role, transfer=transfer
        )
        self.scheduler.submit(new, self.now)
        self.runner.begin(sequence_id, prompt)

    def orders(self) -> list[TransferOrder]:
        return self.scheduler.transfers.take_orders()

    def told(self, *news: object) -> None:
        for one in news:
            self.events += self.scheduler.take(one, self.now)  # type: ignore[arg-type]
            self.scheduler.invariants()

    def kinds(self) -> list[str]:
        return [type(order).__name__ for order in self.orders()]

    def write(self, order: Import) -> None:
        """Into these pages what a prefill would have computed."""
        other = Bench()
        other.submit(1, PROMPT, max_tokens=1)
        other.step()
        (pages,) = other.runner.plans[0].rows[0].page_table
        for at, page in enumerate(order.page_ids, order.first):
            self.runner.arena[page] = list(other.runner.arena[pages[at]])
            self.runner.tags[page] = order.generations[at - order.first]


def imported(bench: Leg) -> Import:
    bench.step()
    (order,) = [order for order in bench.orders() if isinstance(order, Import)]
    return order


def transfer_holds(bench: Bench) -> int:
    return bench.scheduler.pool.num_with(HoldKind.TRANSFER)
