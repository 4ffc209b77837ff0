"""What news of transfers come to, for the scheduler to act on."""

from __future__ import annotations

from dataclasses import dataclass

from engine.schedule.pages import PageId
from engine.schedule.sequence import Sequence
from engine.schedule.shelf import Chain
from engine.schedule.transfer_orders import Handover

OVER = "transfer: found over, allowed complete; send the request again"
_TRANSFER_CODES = {
    "transfer_refused",
    "transfer_lost",
    "transfer_timeout",
    "transfer_corrupt",
    "transfer_layout",
}


@dataclass(frozen=True, slots=True)
class Sent:
    """The peer goes on with this sequence."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Grown:
    """So many leading pages of this sequence are in place."""

    sequence: Sequence
    num_pages: int


@dataclass(frozen=True, slots=True)
class TakenOver:
    """All that this sequence needs to go on here is in place."""

    sequence: Sequence
    handover: Handover


@dataclass(frozen=True, slots=True)
class Returned:
    """Pages of this chain are in place, the last ones of it."""

    chain: Chain
    pages: list[PageId]


@dataclass(frozen=True, slots=True)
class Lost:
    """A sequence's transfer failed. code: as of transfer_orders.TransferFailed."""

    sequence: Sequence
    code: str
    message: str

    @property
    def is_doubted(self) -> bool:
        """The peer withdrew because its pages may be wrong, and with them those that came."""
        return self.code in ("page_integrity", "logits_not_finite")

    @property
    def end(self) -> tuple[str, str]:
        """The sequence's code and message."""
        if self.code in _TRANSFER_CODES:
            return self.code, self.message
        return (
            "transfer_lost",
            f"peer: found it withdrawn ({self.code}: {self.message}), allowed at work until the "
            "first token; send the request again",
        )


Outcome = Sent | Grown | TakenOver | Returned | Lost
