"""The role of a node: as it says itself, as it was ordered, and the drain between the two.

An order stands until the node says so too, and again when it starts anew with the role of its
command line. Until then the node is sent nothing new of either kind of work; SetRole goes out once
nothing of ours runs there, or the drain's time is over.
"""

from __future__ import annotations

from policies.contract.wire import Role

DRAIN_S = 20.0


class NodeRole:
    """Of one node, for one gateway; another one's order counts once the node tells of it."""

    def __init__(self) -> None:
        self.current: Role = "mixed"
        self.order: Role | None = None
        self._drained_by: float | None = None  # an order has to be sent then at the latest
        self._sent: Role | None = None  # on this link, and the node has not said it yet

    @property
    def is_switching(self) -> bool:
        return self._drained_by is not None or self._sent is not None

    def ask(self, role: Role, now: float) -> None:
        """Order it. One that is under way is overtaken."""
        self.order = role
        is_new = role != self.current or self._sent is not None
        self._drained_by = now + DRAIN_S if is_new else None

    def greet(self, role: Role, now: float, *, is_new_epoch: bool) -> None:
        """The node's Hello, on a new link. What changed within an epoch was another's order."""
        was_switching = self.is_switching
        self.current, self._sent, self._drained_by = role, None, None
        if self.order in (None, role):
            return
        if is_new_epoch or was_switching:
            self._drained_by = now
        else:
            self.order = None

    def hear(self, role: Role) -> None:
        """The node's Report."""
        self.current = role
        if role == self._sent:
            self._sent = None
        if not self.is_switching and self.order != role:
            self.order = None

    def due(self, now: float, *, is_idle: bool) -> Role | None:
        """What to send now; it counts as sent."""
        if self._drained_by is None or not (is_idle or now >= self._drained_by):
            return None
        self._drained_by, self._sent = None, self.order
        return self.order
