"""What goes to other engines: prompts that are computed for a peer, and chains that come home.

    prompt  begin ─▶ Accepted ─▶ a Send whenever pages seal ─▶ hand_over ─▶ HandedOver
    return  send_back ─▶ Accepted ─▶ one Send, and the HandOver of nothing

All of a chain that was sent keeps a transfer hold until the transfer is quiet, acknowledged or not,
and so does what is before it: it could not be evicted from under the pages behind it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.schedule.outcomes import OVER, Lost, Outcome, Sent
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache
from engine.schedule.sequence import Sequence, State
from engine.schedule.transfer_orders import (
    Accepted,
    Export,
    HandedOver,
    HandOver,
    Handover,
    Send,
    TransferFailed,
    TransferNews,
    TransferOrder,
    TransferQuiet,
    Withdraw,
)

RETURN_S = 60.0  # for a chain to come home, from the end of its sequence on


@dataclass(slots=True, eq=False)
class _Export:
    transfer_id: bytes
    keys: list[bytes]  # of full pages
    owner: bytes
    sequence: Sequence | None  # that computes them; None: it is over, or this is a return
    first: int | None = None  # what the peer lacks begins there; None: it has not accepted
    held: list[PageId] = field(default_factory=list)  # of the chain from its root on
    handover: Handover | None = None
    was_let_go: bool = False
    is_open: bool = True  # neither handed over nor withdrawn
    is_taken_over: bool = False


class Exports:
    """Books by transfer id. give: takes an order."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        page_size: int,
        give: Callable[[TransferOrder], None],
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._give = give
        self._exports: dict[bytes, _Export] = {}

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._exports

    def __len__(self) -> int:
        return len(self._exports)

    # --- a prompt for a peer --------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """Offer the peer a prompt that is yet to be computed."""
        transfer = sequence.transfer
        assert transfer is not None
        keys = sequence.page_keys(sequence.num_prompt // self._page_size, self._page_size)
        owner = sequence.whose.owner
        export = _Export(transfer.transfer_id, keys, owner, sequence)
        self._exports[transfer.transfer_id] = export
        self._give(
            Export(
                transfer.transfer_id,
                transfer.secret,
                transfer.peer,
                tuple(keys),
                sequence.num_prompt,
                sequence.deadline,
            )
        )

    def sealed(self, sequence: Sequence) -> None:
        """More of its pages are computed, or were found."""
        export = self._of(sequence)
        if export.is_open and export.first is not None:
            self._send(export, sequence.page_table[0][: sequence.num_sealed])

    def hand_over(self, sequence: Sequence, handover: Handover) -> None:
        """Its prompt is computed and its first token chosen: the peer goes on, once it accepts."""
        export = self._of(sequence)
        export.handover = handover
        self._complete(export)

    def may_compute(self, sequence: Sequence) -> bool:
        """Not again for nothing, once it was let go of."""
        export = self._of(sequence)
        return export.first is not None or not export.was_let_go

    def let_go(self) -> Sequence | None:
        """The last prompt that is computed and that its peer has no room for yet: others may have
        its pages. It is computed again when the peer accepts."""
        for export in reversed(self._exports.values()):
            sequence = export.sequence
            if sequence and sequence.state is State.MOVING and export.first is None:
                export.handover = None
                export.was_let_go = True
                return sequence
        return None

    # --- a chain that comes home ----------------------------------------------------------------

    def send_back(self, sequence: Sequence, now: float) -> None:
        """Offer what a sequence leaves in the cache to who computed its prompt. Nothing is held for
        it before that peer accepts."""
        transfer = sequence.transfer
        assert transfer is not None
        if not transfer.return_id or transfer.return_id in self:
            return
        num_written = len(sequence.tokens) - 1  # its last token has no place in a page
        keys = sequence.page_keys(num_written // self._page_size, self._page_size)
        keys = keys[: self._cache.depth(keys)]
        if not keys:
            return
        export = _Export(transfer.return_id, keys, sequence.whose.owner, None)
        self._exports[transfer.return_id] = export
        self._give(
            Export(
                transfer.return_id,
                transfer.return_secret,
                transfer.peer,
                tuple(keys),
                len(keys) * self._page_size,
                now + RETURN_S,
            )
        )

    def forget_owner(self, owner: bytes) -> None:
        """A tenant is purged: nothing of it comes home. Prompts under way are still answered."""
        for export in self._exports.values():
            if export.sequence is None and export.owner == owner:
                self._withdraw(export, "aborted", "its tenant was purged")

    # --- the end --------------------------------------------------------------------------------

    def leave(self, sequence: Sequence, code: str, message: str) -> bool:
        """A sequence is over; whether that was before its peer had taken it over."""
        export = self._exports.get(_id_of(sequence))
        if export is not None and export.is_taken_over:
            return False
        if export is not None and export.sequence is not None:
            export.sequence = None
            self._withdraw(export, code, message)
        return True

    def take(self, news: TransferNews) -> Outcome | None:
        export = self._exports[news.transfer_id]
        sequence = export.sequence
        match news:
            case Accepted(first=first) if export.is_open and export.first is None:
                return self._accept(export, first)
            case HandedOver() if sequence and not export.is_open:
                export.sequence = None
                export.is_taken_over = True
                return Sent(sequence)
            case TransferFailed(code=code, message=message):
                return self._lose(export, code, message)
            case TransferQuiet():
                del self._exports[news.transfer_id]
                self._pool.release(reversed(export.held), HoldKind.TRANSFER)
                return self._lose(export, "transfer_lost", OVER)
            case _:  # acknowledged, or told twice, or too late to matter
                return None

    # --- steps of it ----------------------------------------------------------------------------

    def _of(self, sequence: Sequence) -> _Export:
        return self._exports[_id_of(sequence)]

    def _accept(self, export: _Export, first: int) -> Outcome | None:
        sequence = export.sequence
        if not 0 <= first <= len(export.keys):
            fault = f"first: found {first}, allowed up to {len(export.keys)} pages that it has"
            self._withdraw(export, "transfer_corrupt", fault)
            return self._lose(export, "transfer_corrupt", fault)
        export.first = first
        if sequence is not None:
            self._send(export, sequence.page_table[0][: sequence.num_sealed])
            self._complete(export)
            return None
        pages = self._cache.hold_prefix(export.keys, len(export.keys), kind=HoldKind.TRANSFER)
        if len(pages) == len(export.keys):
            self._send(export, pages)
            self._hand_over(export, [])
        else:
            self._withdraw(export, "aborted", "its pages were evicted meanwhile")
        self._pool.release(reversed(pages), HoldKind.TRANSFER)  # those sent have another
        return None

    def _send(self, export: _Export, pages: list[PageId]) -> None:
        """pages: all of the chain that are sealed."""
        assert export.first is not None
        start = max(export.first, len(export.held))
        self._hold(export, pages[len(export.held) :])
        if new := pages[start:]:
            self._give(Send(export.transfer_id, start, tuple(new), self._generations(new)))

    def _complete(self, export: _Export) -> None:
        sequence = export.sequence
        if export.handover is None or export.first is None or sequence is None:
            return
        tail = sequence.page_table[0][sequence.num_sealed :]
        assert len(tail) <= 1
        self._hold(export, tail)
        self._hand_over(export, tail)

    def _hand_over(self, export: _Export, tail: list[PageId]) -> None:
        export.is_open = False
        generations = self._generations(tail)
        self._give(HandOver(export.transfer_id, tuple(tail), generations, export.handover))

    def _hold(self, export: _Export, pages: list[PageId]) -> None:
        self._pool.hold(pages, HoldKind.TRANSFER)
        export.held += pages

    def _generations(self, pages: list[PageId]) -> tuple[int, ...]:
        return tuple(self._pool.generations[page] for page in pages)

    def _withdraw(self, export: _Export, code: str, message: str) -> None:
        export.is_open = False
        self._give(Withdraw(export.transfer_id, code, message))

    def _lose(self, export: _Export, code: str, message: str) -> Outcome | None:
        export.is_open = False
        sequence, export.sequence = export.sequence, None
        return None if sequence is None else Lost(sequence, code, message)

    def holds(self) -> Iterator[PageId]:
        """Pages under transfer holds, once for each."""
        for export in self._exports.values():
            yield from export.held


def _id_of(sequence: Sequence) -> bytes:
    assert sequence.transfer is not None
    return sequence.transfer.transfer_id
