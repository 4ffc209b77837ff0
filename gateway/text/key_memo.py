"""Page keys of a growing conversation: a turn hashes its new pages, the rest is compared.

A radix tree over page runs, one root per key-chain root: conversations share the runs they have in
common, a run is compared at once (memcmp), and only pages that no chain has are hashed.
"""

from __future__ import annotations

from collections import OrderedDict

from policies.contract import page_keys

DEFAULT_BYTES = 32 << 20
RUN_BYTES = 500  # objects of an otherwise empty run
KEY_OBJECT_BYTES = 73  # a key and its place in a list


class _Run:
    """Consecutive pages that no known chain leaves in between."""

    __slots__ = ("children", "ids", "keys", "parent", "place")

    def __init__(self, ids: bytes, keys: list[bytes], parent: _Run | None, place: bytes) -> None:
        self.ids = ids
        self.keys = keys
        self.children: dict[bytes, _Run] = {}  # by the child's first page
        self.parent = parent
        self.place = place  # what the parent knows this run by

    @property
    def num_bytes(self) -> int:
        return RUN_BYTES + len(self.ids) + KEY_OBJECT_BYTES * len(self.keys)


class KeyMemo:
    """Equals policies.contract.page_keys.page_keys, remembering at most max_bytes of chains."""

    def __init__(self, *, page_size: int, max_bytes: int = DEFAULT_BYTES) -> None:
        self._page_size = page_size
        self._width = page_size * page_keys.ID_BYTES
        self._max_bytes = max_bytes
        self._run_by_root: dict[bytes, _Run] = {}
        # Oldest first. A run is touched after all below it, so the oldest is always a leaf.
        self._by_age: OrderedDict[_Run, None] = OrderedDict()
        self.num_bytes = 0

    def page_keys(self, root: bytes, ids: bytes) -> list[bytes]:
        """Keys of all full pages of ids (u32 little endian) in the chain that starts at root."""
        ids = ids[: len(ids) - len(ids) % self._width]
        if not ids:
            return []
        run = self._run_by_root.get(root)
        if run is None:
            run = self._run_by_root[root] = _Run(b"", [], None, root)
            self._add(run)
        path = [run]
        keys: list[bytes] = []
        start = 0
        while start < len(ids):
            child = run.children.get(ids[start : start + self._width])
            if child is None:
                break
            if not ids.startswith(child.ids, start):
                child = self._split(child, self._common_pages(child.ids, ids, start))
            keys += child.keys
            start += len(child.ids)
            run = child
            path.append(run)
        if start < len(ids):
            rest = ids[start:]
            new = page_keys.page_keys(keys[-1] if keys else root, rest, page_size=self._page_size)
            keys += new
            self._append(path, rest, new)
        for touched in reversed(path):
            self._by_age.move_to_end(touched)
        self._evict()
        return keys

    def _append(self, path: list[_Run], ids: bytes, keys: list[bytes]) -> None:
        run = path[-1]
        if run.children or run.parent is None:
            child = _Run(ids, keys, run, ids[: self._width])
            run.children[child.place] = child
            self._add(child)
            path.append(child)
        else:  # a conversation that only grows stays one run
            self.num_bytes -= run.num_bytes
            run.ids += ids
            run.keys = run.keys + keys
            self.num_bytes += run.num_bytes

    def _split(self, run: _Run, num_pages: int) -> _Run:
        """Cuts run after num_pages; returns the upper part, above run in the tree."""
        parent = run.parent
        assert parent is not None
        cut = num_pages * self._width
        self.num_bytes -= run.num_bytes
        upper = _Run(run.ids[:cut], run.keys[:num_pages], parent, run.place)
        parent.children[upper.place] = upper
        run.ids = run.ids[cut:]
        run.keys = run.keys[num_pages:]
        run.parent = upper
        run.place = run.ids[: self._width]
        upper.children[run.place] = run
        self.num_bytes += run.num_bytes
        self._add(upper)
        return upper

    def _common_pages(self, known: bytes, ids: bytes, start: int) -> int:
        """Pages that known has in common with ids from start on, known that they are not all."""
        same, differ = 1, len(known) // self._width
        while differ - same > 1:
            middle = (same + differ) // 2
            end = middle * self._width
            if ids[start : start + end] == known[:end]:
                same = middle
            else:
                differ = middle
        return same

    def _add(self, run: _Run) -> None:
        self._by_age[run] = None
        self.num_bytes += run.num_bytes

    def _evict(self) -> None:
        while self.num_bytes > self._max_bytes and self._by_age:
            run, _ = self._by_age.popitem(last=False)
            self.num_bytes -= run.num_bytes
            if run.parent is None:
                del self._run_by_root[run.place]
            else:
                del run.parent.children[run.place]
