"""Sees that every engine has been told the standing orders, and knows what it answered.

A loop compares what is ordered with what each engine of each linked node was told in its present
life, and tells what is missing: so nodes that join or restart later, lost messages and engines
that were busy need no path of their own. Orders are idempotent by their id: told twice is no harm.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec
import structlog
from msgspec import Struct

from gateway.api.chat_request import read_messages
from gateway.api.tools_request import read_functions
from gateway.cache.orders import (
    MAX_PREFIXES,
    MAX_PURGE_S,
    MAX_PURGES,
    Orders,
    Prefix,
    Purge,
    load_orders,
    new_id,
    save_orders,
)
from gateway.errors import KINDS, GatewayError
from gateway.home import Home
from gateway.nodes.engines import Engine
from gateway.nodes.fleet import Fleet
from gateway.nodes.views import Place
from gateway.text.errors import TextError
from gateway.text.model import TextModel
from policies.contract import wire
from policies.contract.page_keys import owner_tag
from policies.contract.wire import PinResult, PurgeResult, Tier

LOOK_EVERY_S = 0.5
PURGES_AT_ONCE = 8  # of one engine
ASK_AGAIN_S = 30.0  # without an answer, or after a refusal
# A node that is away when a prefix is deleted does not hear it: its pin ends by itself.
LEASE_S = 3600.0
RENEW_S = LEASE_S / 3
UNPINNED_S = 5.0  # an engine that reports no pinned page so long after its answer lost them
log = structlog.get_logger("kagari.cache")

PinState = Literal["pinned", "pending", "failed"]
PurgeState = Literal["purged", "partial", "pending"]


class PinnedOn(Struct, frozen=True):
    """One engine's word on a prefix. code and message say why it failed (docs/errors.md)."""

    node_id: str
    engine: int
    state: PinState
    pages: int = 0
    code: str = ""
    message: str = ""


class PurgedOn(Struct, frozen=True):
    """One engine's word on a purge; left: the tiers that may still hold pages of the tenant."""

    node_id: str
    engine: int
    model: str
    state: PurgeState
    pages: int
    left: tuple[Tier, ...]


@dataclass(slots=True)
class _Told:
    """engine: its life in which it was told; at: on the monotonic clock."""

    engine: Engine
    at: float
    answer: PinResult | PurgeResult | None = None
    answered_at: float = 0.0


class Keeper:
    """Use `keeping()` around the gateway's life. All changes are made in its event loop."""

    def __init__(
        self,
        path: Path,
        home: Home,
        fleet: Fleet,
        *,
        max_pages_per_tenant: int,
        quotas: Mapping[str, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """quotas: by tenant, see wire.Quotas. Raises OrdersError for a file that cannot be used."""
        self._path = path
        self._home = home
        self._fleet = fleet
        self._max_pages = max_pages_per_tenant
        self._shares = tuple(
            (owner_tag(home.salt(tenant)), share) for tenant, share in sorted(quotas.items())
        )
        self._quotas_told: dict[tuple[str, int], _Told] = {}  # by node and engine
        self._clock = clock
        self._wall = wall
        orders = load_orders(path)
        self._prefixes = {prefix.prefix_id: prefix for prefix in orders.prefixes}
        self._purges = {purge.purge_id: purge for purge in orders.purges}
        # By node and engine, then by order's id.
        self._told: dict[tuple[str, int], dict[str, _Told]] = {}
        self._ids: dict[tuple[str, str], bytes | PinResult] = {}  # prefix, bundle → packed ids
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._saving = asyncio.Lock()
        self._is_saved = True
        self._is_failing = False  # the disk refused, and that was logged

    # --- what is ordered --------------------------------------------------------------------------

    def prefixes(self) -> list[Prefix]:
        """Those that have not expired, oldest first."""
        now = self._wall()
        return [prefix for prefix in self._prefixes.values() if prefix.expires_at > now]

    async def pin(self, prefix: Prefix) -> None:
        """Keep it from now on. Raises GatewayError for one beyond the tenant's quota."""
        alike = [one for one in self.prefixes() if one.tenant == prefix.tenant]
        if any(one.name == prefix.name for one in alike):
            raise GatewayError(
                "prefix_exists",
                field="name",
                found=f"a prefix {prefix.name!r} of tenant {prefix.tenant!r}",
                allowed="a name that this tenant has not given yet",
                remedy="delete that prefix first, or choose another name",
            )
        pinned = sum([one.pages for one in alike if one.model == prefix.model])
        if pinned + prefix.pages > self._max_pages:
            raise GatewayError(
                "pin_quota_exceeded",
                field="messages" if prefix.prompt is None else "prompt",
                found=f"{prefix.pages} pages beside {pinned} that tenant has pinned of this model",
                allowed=f"{self._max_pages} pages of a tenant on each engine",
                remedy="delete a prefix, shorten this one, or raise prefixes.max_pages_per_tenant",
            )
        if len(self._prefixes) >= MAX_PREFIXES:
            raise GatewayError(
                "pin_quota_exceeded",
                found=f"{len(self._prefixes)} prefixes",
                allowed=f"{MAX_PREFIXES} of one gateway",
                remedy="delete some",
            )
        self._prefixes[prefix.prefix_id] = prefix
        try:
            await self._save()
        except OSError as error:
            self._drop(prefix.prefix_id)
            log.error("orders_not_saved", error=str(error))
            raise GatewayError(
                "server_error",
                found="a home that cannot be written",
                allowed="a prefix that outlives the gateway",
                remedy="free space on its disk, then send the request again",
            ) from error
        self._wake.set()

    async def unpin(self, prefix_id: str) -> None:
        """Forget a prefix; its pages are evicted as any others from now on."""
        self._drop(prefix_id)
        await self._save_or_later()

    async def purge(self, tenant: str) -> tuple[Purge, int]:
        """Have every engine forget a tenant; its prefixes are unpinned first, so many of them."""
        own = [one.prefix_id for one in self._prefixes.values() if one.tenant == tenant]
        for prefix_id in own:
            self._drop(prefix_id)
        for earlier in [one for one in self._purges.values() if one.tenant == tenant]:
            del self._purges[earlier.purge_id]  # whoever did not answer it is asked by this one
        purge = Purge(new_id(), tenant, self._wall())
        self._purges[purge.purge_id] = purge
        while len(self._purges) > MAX_PURGES:
            oldest = next(iter(self._purges))
            log.warning("purge_forgotten", purge_id=oldest, tenant=self._purges[oldest].tenant)
            del self._purges[oldest]
        await self._save_or_later()
        self._wake.set()
        return purge, len(own)

    def _drop(self, prefix_id: str) -> None:
        prefix = self._prefixes.pop(prefix_id)
        self._ids = {key: ids for key, ids in self._ids.items() if key[0] != prefix_id}
        for place in self._fleet.places():
            if place.speaks and place.engine.info.model == prefix.model:
                # One that this process never told may have it from the process before.
                self._fleet.order(place, wire.Unpin(place.index, prefix_id))

    # --- what came of it --------------------------------------------------------------------------

    def pinned_on(self, prefix: Prefix) -> list[PinnedOn]:
        """What each engine that serves the model says."""
        return [
            self._pinned_on(prefix, place)
            for place in self._fleet.places()
            if place.engine.info.model == prefix.model
        ]

    def _pinned_on(self, prefix: Prefix, place: Place) -> PinnedOn:
        told = self._told_at(place).get(prefix.prefix_id)
        answer = told.answer if told is not None and told.engine is place.engine else None
        if not place.speaks:
            answer = PinResult(place.index, prefix.prefix_id, 0, "unsupported", TOO_OLD)
        if not isinstance(answer, PinResult):
            return PinnedOn(place.node_id, place.index, "pending")
        state: PinState = "failed" if answer.code else "pinned"
        return PinnedOn(
            place.node_id, place.index, state, answer.pages, answer.code, answer.message
        )

    def purged_on(self, purge: Purge) -> list[PurgedOn]:
        """What each engine of a node that is or lately was linked says."""
        return [self._purged_on(purge, place) for place in self._fleet.places(linked=False)]

    def is_answered(self, purge: Purge) -> bool:
        """Every engine that can answer now has, one way or the other."""
        return all(
            [
                self._purged_on(purge, place).state != "pending"
                for place in self._fleet.places()
                if place.speaks
            ]
        )

    def _purged_on(self, purge: Purge, place: Place) -> PurgedOn:
        told = self._told_at(place).get(purge.purge_id)
        answer = told.answer if told is not None else None
        info = place.engine.info
        where = (place.node_id, place.index, info.model)
        if not isinstance(answer, PurgeResult):
            every: tuple[Tier, ...] = ("device", *dict(info.tier_pages))
            return PurgedOn(*where, "pending", 0, every)
        state: PurgeState = "partial" if answer.left else "purged"
        return PurgedOn(*where, state, answer.pages, answer.left)

    async def wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Until it is, or the time is over."""
        deadline = self._clock() + timeout_s
        while not is_done() and (left_s := deadline - self._clock()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(min(left_s, LOOK_EVERY_S)):  # nodes come and go
                    await self._changed.wait()
            except TimeoutError:
                continue

    def take(self, node_id: str, answer: PinResult | PurgeResult) -> None:
        """A node's answer; one that nobody here asked for is ignored."""
        order_id = answer.pin_id if isinstance(answer, PinResult) else answer.purge_id
        told = self._told.get((node_id, answer.engine), {}).get(order_id)
        if told is None:
            return
        if isinstance(answer, PinResult) and answer.code:
            answer = msgspec.structs.replace(answer, code=_told_code(answer.code))
        told.answer, told.answered_at = answer, self._clock()
        purge = self._purges.get(order_id)
        if purge is not None and isinstance(answer, PurgeResult) and not answer.left:
            done = (node_id, told.engine.info.model)
            if done not in purge.done:
                self._purges[order_id] = msgspec.structs.replace(purge, done=purge.done | {done})
                self._is_saved = False
                self._wake.set()
        self._changed.set()

    # --- the loop ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run(), name="cache keeper")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            if not self._is_saved:
                await self._save_or_later()

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # a fault in one order must not end all others
                log.exception("cache_keeper_failed")
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Tell what has not been told; one pass."""
        wall = self._wall()
        expired = [one.prefix_id for one in self._prefixes.values() if one.expires_at <= wall]
        for prefix_id in expired:
            self._drop(prefix_id)
        for purge in list(self._purges.values()):
            if wall - purge.asked_at > MAX_PURGE_S:
                del self._purges[purge.purge_id]
                self._is_saved = False
        for place in self._fleet.places():
            await self._look_at(place)
            await asyncio.sleep(0)  # many orders on many engines: streams go on in between
        if expired or not self._is_saved:
            await self._save_or_later()
        self._forget_gone()

    async def _look_at(self, place: Place) -> None:
        now = self._clock()
        for prefix in list(self._prefixes.values()):
            is_ordered = prefix.prefix_id in self._prefixes  # still, after any rendering
            if is_ordered and self._wants_pin(prefix, place, now):
                await self._tell_pin(prefix, place, now)
        self._tell_purges(place, now)
        self._tell_quotas(place, now)

    def _tell_quotas(self, place: Place, now: float) -> None:
        """Again and again, as they have no answer; none too, as an earlier gateway had some."""
        where = place.node_id, place.index
        told = self._quotas_told.get(where)
        is_due = told is None or told.engine is not place.engine or now - told.at >= ASK_AGAIN_S
        if (
            is_due
            and place.speaks
            and self._fleet.order(place, wire.Quotas(place.index, self._shares))
        ):
            self._quotas_told[where] = _Told(place.engine, now)

    def _tell_purges(self, place: Place, now: float) -> None:
        """A few at a time: each makes an engine look through all that its tiers hold."""
        under_way = [
            told
            for order_id, told in self._told_at(place).items()
            if told.answer is None
            and order_id in self._purges
            and told.engine is place.engine
            and now - told.at < ASK_AGAIN_S
        ]
        room = PURGES_AT_ONCE - len(under_way)
        for purge in list(self._purges.values()):
            if room <= 0:
                return
            if self._wants_purge(purge, place, now):
                order = wire.Purge(place.index, purge.purge_id, self._home.salt(purge.tenant))
                self._tell(purge.purge_id, place, order, now)
                room -= 1

    def _wants_pin(self, prefix: Prefix, place: Place, now: float) -> bool:
        engine = place.engine
        if engine.info.model != prefix.model or not (place.speaks and place.is_serving):
            return False
        told = self._told_at(place).get(prefix.prefix_id)
        if told is None or told.engine is not engine:
            return True
        answer = told.answer
        if not isinstance(answer, PinResult) or answer.code:
            return now - max(told.at, told.answered_at) >= ASK_AGAIN_S
        if now - told.at >= RENEW_S:
            return True
        return _is_lost(told) and now - max(told.at, told.answered_at) >= UNPINNED_S

    def _wants_purge(self, purge: Purge, place: Place, now: float) -> bool:
        if not place.speaks or (place.node_id, place.engine.info.model) in purge.done:
            return False
        told = self._told_at(place).get(purge.purge_id)
        return told is None or told.engine is not place.engine or now - told.at >= ASK_AGAIN_S

    async def _tell_pin(self, prefix: Prefix, place: Place, now: float) -> None:
        info = place.engine.info
        key = prefix.prefix_id, info.bundle_digest
        ids = self._ids.get(key)
        if ids is None:
            text = self._fleet.bundles.text(info.bundle_digest)
            if text is None:
                return
            ids = self._ids[key] = await _ids(prefix, text)
            if prefix.prefix_id not in self._prefixes:  # deleted while it was rendered
                del self._ids[key]
                return
        if isinstance(ids, PinResult):
            answer = msgspec.structs.replace(ids, engine=place.index)
            self._told_at(place)[prefix.prefix_id] = _Told(place.engine, now, answer, now)
            self._changed.set()
            return
        ttl_s = min(LEASE_S, prefix.expires_at - self._wall())
        salt = self._home.salt(prefix.tenant)
        pin = wire.Pin(place.index, prefix.prefix_id, ids, salt, ttl_s, self._max_pages)
        self._tell(prefix.prefix_id, place, pin, now)

    def _tell(self, order_id: str, place: Place, order: wire.Pin | wire.Purge, now: float) -> None:
        if not self._fleet.order(place, order):
            return
        told_there = self._told_at(place)
        before = told_there.get(order_id)
        told = told_there[order_id] = _Told(place.engine, now)
        if before is not None and before.engine is place.engine and _is_held(before):
            told.answer, told.answered_at = before.answer, before.answered_at  # while it is renewed

    def _told_at(self, place: Place) -> dict[str, _Told]:
        return self._told.setdefault((place.node_id, place.index), {})

    def _forget_gone(self) -> None:
        """Answers of nodes that are known no more, and to orders that stand no more."""
        known = {(place.node_id, place.index) for place in self._fleet.places(linked=False)}
        for told_at in (self._told, self._quotas_told):
            for where in told_at.keys() - known:
                del told_at[where]
        for told in self._told.values():
            for order_id in told.keys() - self._prefixes.keys() - self._purges.keys():
                del told[order_id]

    async def _save_or_later(self) -> None:
        """What is ordered holds, saved or not: a full disk must not keep a tenant's pages alive."""
        try:
            await self._save()
        except OSError as error:
            if not self._is_failing:
                log.error("orders_not_saved", error=str(error))
            self._is_failing = True

    async def _save(self) -> None:
        """Raises OSError."""
        async with self._saving:
            self._is_saved = True
            orders = Orders(tuple(self._prefixes.values()), tuple(self._purges.values()))
            try:
                await asyncio.to_thread(save_orders, self._path, orders)
                self._is_failing = False
            except BaseException:
                self._is_saved = False
                raise


# Names that engines use between themselves, and what the operator is told instead.
CODE_BY_ENGINES = {
    "pool_too_small": "pin_quota_exceeded",
    "pin_failed": "capacity_exceeded",
    "invalid_submit": "invalid_request",
}


def _told_code(code: str) -> str:
    told = CODE_BY_ENGINES.get(code, code)
    return told if told in KINDS else "engine_error"


def _is_held(told: _Told) -> bool:
    return isinstance(told.answer, PinResult) and not told.answer.code and not _is_lost(told)


def _is_lost(told: _Told) -> bool:
    """A life that ended and began while its link was cut looks like the one that answered."""
    report, answer = told.engine.report, told.answer
    return (
        report is not None and report.pages_pinned == 0 and answer is not None and answer.pages > 0
    )


TOO_OLD = "the node's version knows no prefixes; upgrade it"


async def render(prefix: Prefix, text: TextModel) -> array[int]:
    """Token ids (typecode 'I') as a request's prompt has them. Raises TextError, GatewayError."""
    if prefix.prompt is not None:
        return await text.raw_prompt(prefix.prompt)
    return await text.chat_prompt(
        read_messages(prefix.messages or ()),
        read_functions(prefix.tools).functions,
        add_generation_prompt=False,  # what follows is the client's
    )


async def _ids(prefix: Prefix, text: TextModel) -> bytes | PinResult:
    """Packed, or why this tokenizer's bundle cannot have it."""
    try:
        return wire.pack_ids(await render(prefix, text))
    except TextError as error:
        code = error.code if error.code in KINDS else "invalid_request"
        why = f"{error.field}: found {error.found}, allowed is {error.allowed}"
    except GatewayError as error:
        code, why = error.code, error.message
    return PinResult(0, prefix.prefix_id, 0, code, why)
