"""The pages that one tier of a modelled node holds: least recently used first, tails first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Pages:
    """A chain is used deepest page first, so its tail is always older than what it stands on: the
    deepest page that is held proves the whole prefix."""

    def __init__(self, capacity_pages: int) -> None:
        self.capacity_pages = capacity_pages
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def depth(self, keys: Sequence[bytes], most: int) -> int:
        """How many of the first `most` pages of this chain are held."""
        held = self._held
        depth = most
        while depth and keys[depth - 1] not in held:
            depth -= 1
        return depth

    def use(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Hold this chain as the newest; keys that were not held before, and those that went."""
        held = self._held
        stored: list[bytes] = []
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
                stored.append(key)
        removed = [
            held.popitem(last=False)[0] for _ in range(max(0, len(held) - self.capacity_pages))
        ]
        return stored, removed
