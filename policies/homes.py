"""Which node served a session's last turn: bounded, keyed by digests of one tenant's keys."""

from __future__ import annotations

from collections import OrderedDict


class Homes:
    """affinity key → home node. Keys are digests scoped to tenant and model by the caller.

    An entry lives until it was idle for idle_s; over max_keys the longest idle one goes.
    """

    def __init__(self, max_keys: int = 65_536, idle_s: float = 3600.0) -> None:
        self._max_keys = max_keys
        self._idle_s = idle_s
        self._home_by_key: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._home_by_key)

    def find(self, key: bytes, now: float) -> str | None:
        """The session's home node, or None when it is new or was idle too long."""
        entry = self._home_by_key.get(key)
        if entry is None:
            return None
        node_id, used_at = entry
        if now - used_at > self._idle_s:
            del self._home_by_key[key]
            return None
        return node_id

    def settle(self, key: bytes, node_id: str, now: float) -> None:
        """Make node_id the session's home from now on."""
        self._home_by_key[key] = (node_id, now)
        self._home_by_key.move_to_end(key)
        if len(self._home_by_key) > self._max_keys:
            self._home_by_key.popitem(last=False)
