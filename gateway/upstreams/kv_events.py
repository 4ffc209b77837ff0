"""vLLM's KV events read as ours: its blocks, named by hashes of its own, become pages of our keys.

The hashes depend on the server's seed and settings; the token ids that come with them do not, so a
page's key is made of those, whatever the server's block size. Messages are read without a schema:
older servers write an event as an array, newer ones as a map.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from policies.contract.page_keys import EVENT_KEY_BYTES, ID_BYTES, next_key
from policies.contract.wire import CacheCleared, PageEvent, PageRemoved, PageStored, pack_ids

MAX_BLOCKS = 1_000_000
_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx"),
)
_REMOVED = ("block_hashes", "medium", "group_idx")
BlockHash = int | bytes


@dataclass(frozen=True, slots=True)
class _Block:
    """What follows it continues here. pages: the keys of those that it completed."""

    page_key: bytes  # of the last full page, or the root
    tail: bytes  # ids behind that page
    pages: tuple[bytes, ...]


class BlockBook:
    """The blocks of one server. root_of gives the root of a chain by its cache_salt, or None where
    that is nobody's of ours."""

    def __init__(self, page_size: int, root_of: Callable[[str | None], bytes | None]) -> None:
        self._page_bytes = page_size * ID_BYTES
        self._root_of = root_of
        self._block_by_hash: OrderedDict[BlockHash, _Block] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def read(self, payload: bytes) -> list[PageEvent]:
        """One message: [time, events, …]. Raises ValueError for what is none."""
        try:
            batch = msgspec.msgpack.decode(payload)
            found: list[PageEvent] = []
            for event in batch[1]:
                found += self._event(event)
        except (msgspec.MsgspecError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise ValueError(f"no batch of KV events: {error}") from error
        return found

    def _event(self, event: Any) -> Iterator[PageEvent]:
        if isinstance(event, dict):
            kind, fields = event["type"], event
        else:
            kind = event[0]
            names = _STORED if kind == "BlockStored" else _REMOVED
            fields = dict(zip(names, event[1:], strict=False))
        if kind == "AllBlocksCleared":
            self._block_by_hash.clear()
            yield CacheCleared()
        elif fields.get("medium") not in (None, "GPU") or fields.get("group_idx"):
            return  # of a slower tier, or of a group beside the one that keeps all tokens
        elif kind == "BlockStored":
            yield from self._stored(fields)
        elif kind == "BlockRemoved":
            yield from self._removed(fields["block_hashes"])

    def _stored(self, fields: Mapping[str, Any]) -> Iterator[PageEvent]:
        if fields.get("lora_name") is not None or fields.get("lora_id") is not None:
            return  # another model's
        extra = fields.get("extra_keys")
        parent = self._before(fields["parent_block_hash"], extra)
        if parent is None:
            return
        size: int = fields["block_size"]
        ids: Sequence[int] = fields["token_ids"]
        for number, name in enumerate(fields["block_hashes"]):
            own = array("I", ids[number * size : (number + 1) * size])
            block = self._continue(parent, pack_ids(own))
            if name not in self._block_by_hash:
                yield from (PageStored(key) for key in block.pages)
            self._block_by_hash[name] = block
            parent = block
        while len(self._block_by_hash) > MAX_BLOCKS:
            yield from self._removed([next(iter(self._block_by_hash))])

    def _before(self, parent: BlockHash | None, extra: Any) -> _Block | None:
        """Where a run of blocks begins; None where that is not known here."""
        if parent is not None:
            return self._block_by_hash.get(parent)
        first = (extra[0] if extra else None) or ()
        salt = next((one for one in first if isinstance(one, str)), None)
        root = self._root_of(salt)
        return None if root is None else _Block(root, b"", ())

    def _continue(self, parent: _Block, ids: bytes) -> _Block:
        key, tail, pages = parent.page_key, parent.tail + ids, []
        while len(tail) >= self._page_bytes:
            key = next_key(key, tail[: self._page_bytes])
            tail = tail[self._page_bytes :]
            pages.append(key[:EVENT_KEY_BYTES])
        return _Block(key, tail, tuple(pages))

    def _removed(self, names: Sequence[BlockHash]) -> Iterator[PageEvent]:
        """A page goes with the block that completed it: chains are evicted tail first."""
        for name in names:
            block = self._block_by_hash.pop(name, None)
            if block is not None:
                yield from (PageRemoved(key) for key in block.pages)
