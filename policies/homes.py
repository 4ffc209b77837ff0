"""Which node served a session's last turn: bounded, keyed by digests of one tenant's keys."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionHome:
    """since: the node became home; used_at: the last turn. page_key: event key of the deepest full
    page of the last prompt, of prompt_pages; None for a prompt under a page."""

    node_id: str
    since: float
    used_at: float
    page_key: bytes | None
    prompt_pages: int


class Homes:
    """affinity key → home node. Keys are digests scoped to tenant and model by the caller.

    An entry lives until it was idle for idle_s; over max_keys the longest idle one goes.
    """

    def __init__(self, max_keys: int = 65_536, idle_s: float = 3600.0) -> None:
        self._max_keys = max_keys
        self._idle_s = idle_s
        self._home_by_key: OrderedDict[bytes, SessionHome] = OrderedDict()

    def __len__(self) -> int:
        return len(self._home_by_key)

    def find(self, key: bytes, now: float) -> str | None:
        """The session's home node, or None when it is new or was idle too long."""
        home = self.look(key, now)
        if home is None:
            self._home_by_key.pop(key, None)
            return None
        return home.node_id

    def look(self, key: bytes, now: float) -> SessionHome | None:
        """All that is known of a session, without any change."""
        home = self._home_by_key.get(key)
        return None if home is None or now - home.used_at > self._idle_s else home

    def keys(self) -> list[bytes]:
        """Of all sessions, idle ones too, longest idle first."""
        return list(self._home_by_key)

    def settle(
        self,
        key: bytes,
        node_id: str,
        now: float,
        page_key: bytes | None = None,
        prompt_pages: int = 0,
    ) -> None:
        """Make node_id the session's home from now on."""
        old = self._home_by_key.get(key)
        since = old.since if old is not None and old.node_id == node_id else now
        self._home_by_key[key] = SessionHome(node_id, since, now, page_key, prompt_pages)
        self._home_by_key.move_to_end(key)
        if len(self._home_by_key) > self._max_keys:
            self._home_by_key.popitem(last=False)
