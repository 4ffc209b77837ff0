"""The cluster tier: pages in a Mooncake Store, where any node finds what another computed.

Object name: kv1/<layout digest>/<page kind>/<page key>, in hex; object: header and payload
(page_codec), so that each page is proven to be the one asked for: the store itself returned flipped
bytes as success. Nodes whose bits differ find none of each other's pages, and purge them alike.
Objects are write-once there, evicted as the store sees fit, and lost with the node that holds them
or with a restarted master: all of that is a miss here.

A call hangs for HANG_S or twice that on a stopped node: use it behind store/guard.py. Mooncake
reads and writes buffers of this tier only, so the caller's views are quiet whenever a call returns.
It may write a buffer even after it gave up on it; so a page is verified where it was delivered.

Mooncake's ports have no authentication: a store belongs where every host is trusted.
"""

from __future__ import annotations

import atexit
import ctypes
import http.client
import importlib
import mmap
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engine.config import ConfigError
from engine.store.page_codec import (
    HEADER_BYTES,
    PageFault,
    PageLayout,
    check_page,
    copy_bytes,
    decode_header,
    encode_page,
    layout_digest,
)
from engine.store.store_url import FIELD, parse_store_url
from engine.store.tier import COUNTED_AS, PageRecord, Status, TierStats
from policies.contract.wire import Tier as TierName

LANES = 4  # calls at once, as many as a Guard has threads
LANE_BYTES = 16 << 20  # pages of one batch; at least one page
LANE_PAGES = 32
PROBE_S = 1.0  # to find the master's port open
RETRY_S = (0.5, 30.0)  # pause before the second attempt to join the store, and the longest one
HANG_S = 5  # Mooncake gives up on a transfer or a master (30 s each if it is not told)
CLOSE_S = HANG_S + 1.0
BUSY_S = 0.02  # before a purge looks again

# Mooncake's return codes. Any other is UNAVAILABLE: nothing is there for now.
NOT_FOUND, WRONG_SIZE = -704, -600
BUSY = frozenset({-703, -706, -708})  # being put, read or copied by another
STATUS_OF_CODE = {
    -200: Status.NOSPACE,  # no room, or no segment is left
    -703: Status.MISS,  # still being put
    NOT_FOUND: Status.MISS,
    -712: Status.MISS,  # its last replica is gone
    -705: Status.OK,  # put: held already
}


@dataclass(frozen=True, slots=True)
class Lane:
    """Buffers of one call, registered with the store: one page each, one after the other."""

    slots: list[memoryview]
    addresses: list[int]
    whole: memoryview


class MooncakeTier:
    """Joins the store in the background, again and again until it is there: an engine starts and
    serves without it. Until then, and whenever the store is gone, calls answer UNAVAILABLE."""

    name: TierName = "cluster"
    capacity_pages = 0  # what it keeps is the store's choice

    def __init__(self, url: str, layout: PageLayout, kind: str) -> None:
        """kind: see page_kind. Raises ConfigError on a wrong URL, or where Mooncake is not
        installed."""
        self._address = parse_store_url(url)
        self._library = library("mooncake.store", FIELD)
        self._layout = layout
        self._all_kinds = f"kv1/{layout_digest(layout).hex()}/"
        self._prefix = f"{self._all_kinds}{kind}/"
        self._object_bytes = HEADER_BYTES + layout.page_bytes
        stride = -(-self._object_bytes // 64) * 64
        lane_pages = min(LANE_PAGES, max(1, LANE_BYTES // stride))
        self._memory = mmap.mmap(-1, LANES * lane_pages * stride)
        self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in _lanes(self._memory, lane_pages, stride, self._object_bytes):
            self._lanes.put(lane)
        self._lanes_out = LANES  # what is left to come back once it closes
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._store: Any = None
        self._joined = threading.Event()
        self._closing = threading.Event()
        self._joiner = threading.Thread(target=self._join, name="cluster-store-join", daemon=True)
        self._joiner.start()
        atexit.register(self._end)

    def wait_joined(self, deadline: float) -> bool:
        """Whether the store is joined by then."""
        return self._joined.wait(_left(deadline))

    def records(self) -> tuple[PageRecord, ...]:
        """None: what other nodes hold changes without us, so only get tells."""
        return ()

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        """Asked of the master. To ask renews a lease of 10 s in which the store cannot evict these
        pages, and puts then fail; so nothing in the engine calls it before get."""
        with self._lane(deadline) as lane:
            if isinstance(lane, Status):
                return 0
            found = self._store.batch_is_exist([self._object(key) for key in keys])
        return next((at for at, code in enumerate(found) if code != 1), len(keys))

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        def step(lane: Lane, pages: slice) -> list[Status]:
            names = [self._object(key) for key in keys[pages]]
            codes = self._store.batch_get_into(
                names, lane.addresses[: len(names)], [self._object_bytes] * len(names)
            )
            statuses = [
                self._receive(*page)
                for page in zip(codes, lane.slots, keys[pages], into[pages], strict=False)
            ]
            refused = [
                name
                for name, status in zip(names, statuses, strict=True)
                if status in (Status.CORRUPT, Status.STALE)
            ]
            if refused:  # else what is wrong stays for good: objects are write-once
                self._store.batch_remove(refused, True)
            return statuses

        for view in into:
            if len(view) != self._layout.page_bytes:
                raise ValueError(f"view has {len(view)} bytes, want {self._layout.page_bytes}")
        return self._in_batches(len(keys), deadline, step, ok="hits")

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        def step(lane: Lane, pages: slice) -> list[Status]:
            names = [self._object(record.key) for record in records[pages]]
            for page in zip(records[pages], payloads[pages], lane.slots, strict=False):
                encode_page(page[0], page[1], layout=self._layout, into=page[2])
            codes = self._store.batch_put_from(
                names, lane.addresses[: len(names)], [self._object_bytes] * len(names)
            )
            return [_status(code) for code in codes]

        return self._in_batches(len(records), deadline, step, ok="stored")

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """What is there is overwritten first: a removed object's bytes would stay in its owner's
        memory until others need the room."""

        def step(lane: Lane, pages: slice) -> list[Status]:
            names = [self._object(key) for key in keys[pages]]
            held = self._store.batch_is_exist(names)
            codes = dict.fromkeys(names, NOT_FOUND) | {
                name: code for name, code in zip(names, held, strict=True) if code < 0
            }
            codes |= self._erase(
                lane, [name for name, code in zip(names, held, strict=True) if code == 1]
            )
            return [_status(codes[name]) for name in names]

        return self._in_batches(len(keys), deadline, step, ok="removed")

    def purge(self, owner: bytes, deadline: float) -> Status:
        """By a scan of the whole store, so that it also finds what nodes that are gone have put:
        the master lists the names, each object's header tells the owner, and the tenant's objects
        are overwritten in place and removed. Pages of this tier's layout, of any kind; 0.1 ms an
        object. Objects whose header cannot be believed go too."""
        with self._lane(deadline) as lane:
            if isinstance(lane, Status):
                return lane
            try:
                while (status := self._sweep(lane, owner, deadline)) is None:
                    time.sleep(BUSY_S)
            except (OSError, http.client.HTTPException):
                status = Status.UNAVAILABLE
        return Status.TIMEOUT if time.monotonic() >= deadline else status

    def flush(self, deadline: float) -> Status:
        """A put has ended when the store holds the page: nothing is left to do."""
        with self._lane(deadline) as lane:
            return lane if isinstance(lane, Status) else Status.OK

    def stats(self) -> TierStats:
        with self._lock:
            counts = dict(self._counts)
        return TierStats(capacity_pages=0, used_pages=0, **counts)

    def close(self) -> None:
        """Leave the store, which loses the segment that this engine gave. A call that still hangs
        after CLOSE_S keeps the connection: to cut it under a running call is not safe."""
        if self._closing.is_set():
            return
        self._closing.set()
        deadline = time.monotonic() + CLOSE_S
        if not self._is_quiet(deadline):
            return
        atexit.unregister(self._end)
        self._joiner.join(_left(deadline))
        if self._joined.is_set():
            # Without its master it takes long to leave.
            leaver = threading.Thread(target=self._store.close, name="cluster-store-leave")
            leaver.daemon = True
            leaver.start()
            leaver.join(_left(deadline))

    def _end(self) -> None:
        """A process that ends while a call hangs in Mooncake crashes: wait until it gives up."""
        self.close()
        self._is_quiet(time.monotonic() + 2 * HANG_S)

    def _is_quiet(self, deadline: float) -> bool:
        """Closing: whether all calls are out by then."""
        with suppress(queue.Empty):
            while self._lanes_out:
                self._lanes.get(timeout=_left(deadline))
                self._lanes_out -= 1
        return not self._lanes_out

    # --- inside ---------------------------------------------------------------------------------

    def _object(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _in_batches(
        self,
        count: int,
        deadline: float,
        step: Callable[[Lane, slice], list[Status]],
        *,
        ok: str,
    ) -> list[Status]:
        """step, a lane's worth of pages at a time, until the deadline or until nobody answers."""
        statuses: list[Status] = []
        with self._lane(deadline) as lane:
            rest = lane if isinstance(lane, Status) else None
            while rest is None and len(statuses) < count:
                assert isinstance(lane, Lane)
                if time.monotonic() >= deadline:
                    rest = Status.TIMEOUT
                else:
                    statuses += step(lane, slice(len(statuses), len(statuses) + len(lane.slots)))
                    if statuses[-1] is Status.UNAVAILABLE:
                        rest = Status.UNAVAILABLE
        if rest is not None:
            statuses += [rest] * (count - len(statuses))
        self._count(statuses, ok)
        return statuses

    @contextmanager
    def _lane(self, deadline: float) -> Iterator[Lane | Status]:
        """Buffers for one call, or why there is no call to be made."""
        if self._closing.is_set() or not self._joined.is_set():
            yield Status.UNAVAILABLE
            return
        try:
            lane = self._lanes.get(timeout=_left(deadline))
        except queue.Empty:
            yield Status.TIMEOUT
            return
        try:
            yield Status.UNAVAILABLE if self._closing.is_set() else lane
        finally:
            self._lanes.put(lane)

    def _receive(self, code: int, slot: memoryview, key: bytes, view: memoryview) -> Status:
        """One page that the store says it has copied into slot."""
        if code == WRONG_SIZE:  # it is longer than a page
            return Status.STALE
        if code < 0:
            return _status(code)
        if code != self._object_bytes:
            return Status.CORRUPT
        header = bytes(slot[:HEADER_BYTES])
        copy_bytes(slot[HEADER_BYTES:], view)
        found = check_page(header, view, page_key=key, layout=self._layout)
        if isinstance(found, PageFault):
            return Status.STALE if found.reason == "foreign" else Status.CORRUPT
        return Status.OK

    def _sweep(self, lane: Lane, owner: bytes, deadline: float) -> Status | None:
        """One pass of a purge; None: some of it was busy, try again."""
        busy = False
        batch = min(256, len(lane.whole) // HEADER_BYTES)
        names = self._listed(deadline)
        while listed := list(islice(names, batch)):
            if time.monotonic() >= deadline:
                return Status.TIMEOUT
            every = range(len(listed))
            codes = self._store.get_into_ranges(
                [lane.addresses[0]],
                [listed],
                [[[at * HEADER_BYTES] for at in every]],
                [[[0] for _ in every]],
                [[[HEADER_BYTES] for _ in every]],
            )[0]
            doomed: list[str] = []
            for at, (code,) in enumerate(codes):
                if code == WRONG_SIZE:
                    doomed.append(listed[at])
                elif code == HEADER_BYTES:
                    header = decode_header(
                        lane.whole[at * HEADER_BYTES : (at + 1) * HEADER_BYTES], layout=self._layout
                    )
                    if isinstance(header, PageFault) or header.record.owner == owner:
                        doomed.append(listed[at])
                elif code in BUSY:
                    busy = True
                elif code != NOT_FOUND:
                    return Status.UNAVAILABLE
            erased = list(self._erase(lane, doomed).values())
            busy = busy or any(code in BUSY for code in erased)
            if any(code not in BUSY and code not in (0, NOT_FOUND) for code in erased):
                return Status.UNAVAILABLE
            self._count([Status.OK] * erased.count(0), "removed")
        return None if busy else Status.OK

    def _erase(self, lane: Lane, names: list[str]) -> dict[str, int]:
        """Zeroes over these objects, in place; then they are removed. What could not be overwritten
        stays, so that another try finds it. Forced: a lease only says that somebody has asked; that
        a read was torn its checksum tells."""
        if not names:
            return {}
        lane.slots[0][:] = bytes(self._object_bytes)
        codes = self._store.batch_upsert_from(
            names, [lane.addresses[0]] * len(names), [self._object_bytes] * len(names)
        )
        answers = dict(zip(names, codes, strict=True))
        overwritten = [name for name, code in answers.items() if code == 0]
        if overwritten:
            codes = self._store.batch_remove(overwritten, True)
            answers |= zip(overwritten, codes, strict=True)
        return answers

    def _listed(self, deadline: float) -> Iterator[str]:
        """Names of this layout's objects, as the master sends them. Raises OSError and
        HTTPException."""
        connection = http.client.HTTPConnection(
            self._address.master_host,
            self._address.admin_port,
            timeout=max(0.001, _left(deadline)),
        )
        try:
            connection.request("GET", "/get_all_keys")
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"the master's key list answers {response.status}")
            for line in response:
                name = line.rstrip(b"\r\n").decode(errors="replace")
                if name.startswith(self._all_kinds):
                    yield name
        finally:
            connection.close()

    def _count(self, statuses: list[Status], ok: str) -> None:
        # A page of another layout cannot lie under our key: here it is damage.
        fields = {**COUNTED_AS, Status.OK: ok, Status.STALE: "corrupt"}
        with self._lock:
            self._counts.update(fields[status] for status in statuses)

    def _join(self) -> None:
        """The joiner's thread: ends once the store is joined. From then on Mooncake reconnects by
        itself, also to a master that was restarted."""
        pause, longest = RETRY_S
        while not self._closing.is_set():
            store = self._try_to_join()
            if store is not None and self._closing.is_set():
                store.close()
            elif store is not None:
                self._store = store
                self._joined.set()
                return
            self._closing.wait(pause)
            pause = min(2 * pause, longest)

    def _try_to_join(self) -> Any:
        """The store, joined; None: not now."""
        at = self._address
        try:
            # Mooncake's own attempt takes 4 s and logs; most often nobody listens.
            with socket.create_connection((at.master_host, at.master_port), PROBE_S) as probe:
                host = at.host or probe.getsockname()[0]
        except OSError:
            return None
        store = self._library.MooncakeDistributedStore()
        master = f"{at.master_host}:{at.master_port}"
        code = store.setup(host, "P2PHANDSHAKE", at.segment_bytes, 0, "tcp", "", master)
        whole = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if code == 0 and store.register_buffer(whole, len(self._memory)) == 0:
            return store
        store.close()
        return None


def _left(deadline: float) -> float:
    """Seconds to wait, no more than a wait may have."""
    return min(threading.TIMEOUT_MAX, max(0.0, deadline - time.monotonic()))


def _status(code: int) -> Status:
    return Status.OK if code >= 0 else STATUS_OF_CODE.get(code, Status.UNAVAILABLE)


def _lanes(memory: mmap.mmap, pages: int, stride: int, size: int) -> Iterator[Lane]:
    view = memoryview(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for lane in range(LANES):
        starts = [(lane * pages + at) * stride for at in range(pages)]
        yield Lane(
            [view[start : start + size] for start in starts],
            [base + start for start in starts],
            view[starts[0] : starts[0] + pages * stride],
        )


def library(module: str, field: str) -> Any:
    """One of Mooncake's. Raises ConfigError, of this flag, where it, or a library it needs, is not
    installed."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it logs each step on standard error
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")  # of 20: we try again ourselves
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", str(HANG_S))
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(HANG_S * 1000))
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            field,
            found=f"no Mooncake in this environment ({error})",
            allowed="the extra `mooncake`, and Debian's libibverbs1",
            remedy="pip install 'kagari[mooncake]' && apt-get install libibverbs1",
        ) from error
