"""Every engine is told the standing orders once in its life, whatever comes in between."""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from gateway.cache.keeper import (
    ASK_AGAIN_S,
    LEASE_S,
    PURGES_AT_ONCE,
    RENEW_S,
    UNPINNED_S,
    Keeper,
)
from gateway.cache.orders import MAX_PURGE_S, ORDERS_NAME, OrdersError, Prefix, new_id
from gateway.errors import KINDS, GatewayError
from gateway.home import Home, open_home
from gateway.nodes.bundles import Bundles
from gateway.nodes.fleet import Fleet
from gateway.text.errors import TextError
from policies.contract import wire
from policies.contract.page_keys import owner_tag, tenant_salt
from tests.gateway.nodes.fake_node import DIGEST, Clock, FakeNode, info

pytestmark = pytest.mark.anyio
OTHER_DIGEST = hashlib.sha256(b"another bundle").hexdigest()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Text:
    """A tokenizer: a token is a character, after `shift`."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    async def raw_prompt(self, text: str) -> array[int]:
        if "bad" in text:
            raise TextError("prompt", found="bad", allowed="good", remedy="x")
        return array("I", [ord(character) + self.shift for character in text])


class World:
    """One gateway's keeper and fleet; `restart` is its next process."""

    def __init__(self, folder: Path, *, quota: int = 10) -> None:
        self.shares: dict[str, float] = {}
        self.clock = Clock()
        self.wall_s = 1e9
        self.home: Home = open_home(folder)
        self.quota = quota
        self.restart()

    def restart(self) -> None:
        bundles = Bundles(lambda bundle: bundle)  # type: ignore[arg-type, return-value]
        bundles.put(DIGEST, Text())  # type: ignore[arg-type]
        bundles.put(OTHER_DIGEST, Text(1000))  # type: ignore[arg-type]
        self.fleet = Fleet(
            bundles,
            clock=self.clock,
            on_order_result=lambda node, answer: self.keeper.take(node, answer),
        )
        self.keeper = Keeper(
            self.home.folder / ORDERS_NAME,
            self.home,
            self.fleet,
            max_pages_per_tenant=self.quota,
            quotas=self.shares,
            clock=self.clock,
            wall=lambda: self.wall_s,
        )

    def join(self, node_id: str, *infos: wire.EngineInfo, **changes: Any) -> FakeNode:
        return FakeNode(self.fleet, node_id, *infos, **changes).join()

    def prefix(self, name: str = "p", *, pages: int = 2, **changes: Any) -> Prefix:
        fields: dict[str, Any] = {
            "tenant": "default",
            "model": "m",
            "created_at": self.wall_s,
            "expires_at": self.wall_s + 1000,
            "tokens": pages * 64,
            "prompt": "x" * pages * 64,
        }
        return Prefix(prefix_id=new_id(), name=name, pages=pages, **(fields | changes))

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.wall_s += seconds

    def states(self, prefix: Prefix) -> dict[str, str]:
        return {one.node_id: one.state for one in self.keeper.pinned_on(prefix)}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "home")


def pinned(node: FakeNode, pin: wire.Pin, *, code: str = "") -> None:
    pages = 0 if code else len(pin.prompt) // 4 // 64
    node.send(wire.PinResult(pin.engine, pin.pin_id, pages, code))


def purged(node: FakeNode, purge: wire.Purge, *left: wire.Tier) -> None:
    node.send(wire.PurgeResult(purge.engine, purge.purge_id, 3, left))


async def told(world: World, node: FakeNode) -> list[Any]:
    await world.keeper.look()
    return node.read()


# --- quotas ---------------------------------------------------------------------------------------


async def test_every_engine_is_told_all_quotas_and_that_there_are_none(world: World) -> None:
    shares = tuple((owner_tag(world.home.salt(name)), 0.4) for name in ("acme", "zoo"))
    node = world.join("n1", info(0, "m"), info(1, "other"))
    old = world.join("old", version=wire.TIERS_VERSION - 1)
    for _ in range(2):
        await told(world, node)
    assert node.quotas == [wire.Quotas(0, ()), wire.Quotas(1, ())]
    world.shares = {"zoo": 0.4, "acme": 0.4}
    world.restart()
    again = world.join("n1", info(0, "m"), info(1, "other"))
    for _ in range(2):
        await told(world, again)
    assert again.quotas == [wire.Quotas(0, shares), wire.Quotas(1, shares)]
    for infos in ((), again.infos[:1]):  # it began anew
        again.send(wire.EnginesChanged(infos))
    await told(world, again)
    world.pass_time(ASK_AGAIN_S)  # no answer says that it came
    await told(world, again)
    assert again.quotas[2:] == [wire.Quotas(0, shares)] * 2
    old.read()
    assert old.quotas == []


# --- prefixes -------------------------------------------------------------------------------------


async def test_a_prefix_goes_once_to_every_engine_of_its_model(world: World) -> None:
    first = world.join("n1", info(0, "other"), info(1, "m"))
    second = world.join("n2")
    prefix = world.prefix()
    await world.keeper.pin(prefix)
    (pin,) = await told(world, first)
    (same,) = second.read()
    assert (pin.engine, same.engine, pin.pin_id, same.pin_id) == (1, 0, *[prefix.prefix_id] * 2)
    assert wire.unpack_ids(pin.prompt) == array("I", [ord("x")] * 128)
    assert pin.salt == tenant_salt(world.home.secret, "default")  # as every Submit of the tenant
    assert (pin.ttl_s, pin.max_pages) == (1000, 10)
    assert world.states(prefix) == {"n1": "pending", "n2": "pending"}
    pinned(first, pin)
    assert world.states(prefix) == {"n1": "pinned", "n2": "pending"}
    for _ in range(3):
        assert await told(world, first) == []
    late = world.join("n3")
    (pin,) = await told(world, late)
    assert pin.pin_id == prefix.prefix_id


async def test_an_engine_that_began_anew_is_told_again(world: World) -> None:
    node = world.join("n1")
    prefix = world.prefix()
    await world.keeper.pin(prefix)
    (pin,) = await told(world, node)
    pinned(node, pin)
    node.send(wire.EnginesChanged(()))
    assert world.states(prefix) == {}
    node.send(wire.EnginesChanged(node.infos))
    assert world.states(prefix) == {"n1": "pending"}
    (again,) = [one for one in await told(world, node) if isinstance(one, wire.Pin)]
    assert again == pin
    # The link was cut while the engine began anew: only its reports show it.
    pinned(node, again)
    node.report(pages_pinned=2)
    world.pass_time(UNPINNED_S + 1)
    assert await told(world, node) == []
    node.report(pages_pinned=0)
    (third,) = await told(world, node)
    assert third.pin_id == prefix.prefix_id
    assert third.ttl_s == pytest.approx(1000 - UNPINNED_S - 1)


async def test_what_is_not_answered_or_refused_is_asked_again_but_not_at_once(world: World) -> None:
    silent, full = world.join("n1"), world.join("n2")
    prefix = world.prefix()
    await world.keeper.pin(prefix)
    await world.keeper.look()
    (pin,) = full.read()
    silent.read()
    pinned(full, pin, code="pin_quota_exceeded")
    assert world.states(prefix) == {"n1": "pending", "n2": "failed"}
    world.pass_time(ASK_AGAIN_S - 1)
    assert (await told(world, silent), full.read()) == ([], [])
    world.pass_time(1.1)
    assert len(await told(world, silent)) == len(full.read()) == 1


async def test_each_tokenizer_gets_its_own_ids_and_one_that_cannot_says_why(world: World) -> None:
    other = world.join("n2", info(bundle_digest=OTHER_DIGEST))
    await world.keeper.pin(world.prefix("a"))
    (pin,) = await told(world, other)
    assert set(wire.unpack_ids(pin.prompt)) == {ord("x") + 1000}
    bad = world.prefix("b", prompt="bad" * 64)
    await world.keeper.pin(bad)
    assert await told(world, other) == []
    (failed,) = world.keeper.pinned_on(bad)
    assert (failed.state, failed.code, failed.engine) == ("failed", "invalid_request", 0)
    assert "found bad" in failed.message


async def test_engines_own_names_of_errors_become_documented_ones(world: World) -> None:
    node = world.join("n1")
    prefix = world.prefix()
    await world.keeper.pin(prefix)
    (pin,) = await told(world, node)
    for code, shown in (
        ("pool_too_small", "pin_quota_exceeded"),
        ("pin_failed", "capacity_exceeded"),
        ("draining", "draining"),
        ("something_new", "engine_error"),
    ):
        pinned(node, pin, code=code)
        assert [one.code for one in world.keeper.pinned_on(prefix)] == [shown]
        assert shown in KINDS


async def test_a_node_of_an_older_wire_is_never_told(world: World) -> None:
    old = world.join("n1", version=wire.TIERS_VERSION - 1)
    prefix = world.prefix()
    await world.keeper.pin(prefix)
    await world.keeper.purge("acme")
    assert await told(world, old) == []
    (one,) = world.keeper.pinned_on(prefix)
    assert (one.state, one.code) == ("failed", "unsupported")


async def test_names_and_quotas_are_of_a_tenant(world: World) -> None:
    await world.keeper.pin(world.prefix("a", pages=6))
    for refused, code in (
        (world.prefix("a", pages=1), "prefix_exists"),
        (world.prefix("b", pages=5), "pin_quota_exceeded"),
    ):
        with pytest.raises(GatewayError) as caught:
            await world.keeper.pin(refused)
        assert caught.value.code == code
    await world.keeper.pin(world.prefix("b", pages=4))
    await world.keeper.pin(world.prefix("a", pages=10, tenant="acme"))
    await world.keeper.pin(world.prefix("c", pages=10, model="m2"))
    assert len(world.keeper.prefixes()) == 4


async def test_a_prefix_ends_when_it_is_deleted_and_when_its_time_is_over(world: World) -> None:
    node = world.join("n1")
    short, long = world.prefix("a", expires_at=world.wall_s + 5), world.prefix("b")
    for prefix in (short, long):
        await world.keeper.pin(prefix)
    for pin in await told(world, node):
        pinned(node, pin)
    world.pass_time(5)
    assert world.keeper.prefixes() == [long]
    assert await told(world, node) == [wire.Unpin(0, short.prefix_id)]
    await world.keeper.unpin(long.prefix_id)
    assert node.read() == [wire.Unpin(0, long.prefix_id)]
    world.restart()
    assert world.keeper.prefixes() == []


async def test_a_pin_is_a_lease_so_that_a_node_away_at_its_end_lets_go(world: World) -> None:
    node = world.join("n1")
    prefix = world.prefix(expires_at=world.wall_s + 86_400)
    await world.keeper.pin(prefix)
    (pin,) = await told(world, node)
    assert pin.ttl_s == LEASE_S
    pinned(node, pin)
    node.report(pages_pinned=2)
    world.pass_time(RENEW_S)
    assert await told(world, node) == [pin]
    assert world.states(prefix) == {"n1": "pinned"}  # while it is renewed
    world.pass_time(RENEW_S - 1)
    assert await told(world, node) == []
    world.pass_time(86_400 - 2 * RENEW_S - 99)
    (last,) = await told(world, node)
    assert last.ttl_s == pytest.approx(100)


async def test_prefixes_survive_a_restart_for_the_rest_of_their_time(world: World) -> None:
    prefix = world.prefix()
    await world.keeper.pin(prefix)
    assert (world.home.folder / ORDERS_NAME).stat().st_mode & 0o777 == 0o600
    world.pass_time(400)
    world.restart()
    (pin,) = await told(world, world.join("n1"))
    assert (pin.pin_id, pin.ttl_s) == (prefix.prefix_id, 600)


def test_a_broken_file_is_refused_and_not_overwritten(world: World) -> None:
    path = world.home.folder / ORDERS_NAME
    path.write_text('{"prefixes": [{}]}')
    with pytest.raises(OrdersError, match=ORDERS_NAME):
        world.restart()
    assert path.read_text() == '{"prefixes": [{}]}'


# --- purges ---------------------------------------------------------------------------------------


async def test_a_purge_reaches_every_engine_behind_the_unpins(world: World) -> None:
    node = world.join("n1", info(0, "m"), info(1, "m2", tier_pages=(("disk", 9),)))
    mine, others = world.prefix("a", tenant="acme"), world.prefix("b")
    for prefix in (mine, others):
        await world.keeper.pin(prefix)
    await told(world, node)
    purge, removed = await world.keeper.purge("acme")
    orders = await told(world, node)
    assert orders[0] == wire.Unpin(0, mine.prefix_id)
    salt = tenant_salt(world.home.secret, "acme")
    assert [(one.engine, one.salt) for one in orders[1:]] == [(0, salt), (1, salt)]
    assert owner_tag(salt) != owner_tag(tenant_salt(world.home.secret, "default"))
    assert (removed, world.keeper.prefixes()) == (1, [others])
    assert [one.left for one in world.keeper.purged_on(purge)] == [("device",), ("device", "disk")]
    purged(node, orders[1])
    purged(node, orders[2], "disk")
    states = [(one.state, one.pages, one.left) for one in world.keeper.purged_on(purge)]
    assert states == [("purged", 3, ()), ("partial", 3, ("disk",))]
    world.pass_time(ASK_AGAIN_S)
    again = await told(world, node)
    assert [(type(one), one.engine) for one in again if isinstance(one, wire.Purge)] == [
        (wire.Purge, 1)  # the other one is done
    ]


async def test_a_node_that_was_away_is_told_when_it_returns_even_by_a_new_gateway(
    world: World,
) -> None:
    near, away = world.join("near"), world.join("away")
    away.cut()
    purge, _ = await world.keeper.purge("acme")
    (order,) = await told(world, near)
    assert not world.keeper.is_answered(purge)
    purged(near, order)
    assert world.keeper.is_answered(purge)  # nobody waits for who is away
    assert {one.node_id: one.state for one in world.keeper.purged_on(purge)} == {
        "near": "purged",
        "away": "pending",
    }
    await world.keeper.look()  # writes what is done
    world.restart()
    near, away = world.join("near", epoch=2), world.join("away", epoch=2)
    assert await told(world, near) == []  # what it holds since is the tenant's to keep
    (order,) = away.read()
    assert order.purge_id == purge.purge_id
    purged(away, order)
    world.restart()
    assert await told(world, world.join("away", epoch=3)) != []  # it was not written yet: once more


async def test_a_later_purge_of_a_tenant_replaces_the_earlier(world: World) -> None:
    await world.keeper.purge("acme")
    second, _ = await world.keeper.purge("acme")
    orders = await told(world, world.join("n1"))
    assert [one.purge_id for one in orders] == [second.purge_id]


async def test_answers_to_nobodys_orders_change_nothing(world: World) -> None:
    node = world.join("n1")
    prefix = world.prefix()
    await world.keeper.pin(prefix)
    node.send(wire.PinResult(0, "unknown", 5))
    node.send(wire.PinResult(0, prefix.prefix_id, 5))  # before it was asked
    node.send(wire.PurgeResult(3, "unknown", 5))
    assert world.states(prefix) == {"n1": "pending"}
    assert world.fleet.skipped_frames == 0


async def test_waiting_ends_with_the_answer_or_with_the_time(world: World) -> None:
    keeper = Keeper(
        world.home.folder / "other.json", world.home, world.fleet, max_pages_per_tenant=1
    )
    begun = time.monotonic()
    await keeper.wait(lambda: False, 0.05)
    assert time.monotonic() - begun >= 0.05
    await keeper.wait(lambda: True, 60)
    assert time.monotonic() - begun < 20


async def test_an_engine_gets_a_few_purges_at_a_time(world: World) -> None:
    tenants = [f"t{number}" for number in range(2 * PURGES_AT_ONCE + 3)]
    for tenant in tenants:
        await world.keeper.purge(tenant)
    node = world.join("n1")
    seen: list[bytes] = []
    for most in (PURGES_AT_ONCE, PURGES_AT_ONCE, 3, 0):
        orders = await told(world, node)
        assert len(orders) == most
        assert await told(world, node) == []  # until it has answered
        for order in orders:
            seen.append(order.salt)
            purged(node, order)
    assert seen == [tenant_salt(world.home.secret, tenant) for tenant in tenants]


async def test_a_full_disk_keeps_no_tenants_pages_and_promises_no_prefix(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, orders: object) -> None:
        raise OSError(28, "No space left on device")

    node = world.join("n1")
    with monkeypatch.context() as patched:
        patched.setattr("gateway.cache.keeper.save_orders", full)
        with pytest.raises(GatewayError) as refused:
            await world.keeper.pin(world.prefix())
        assert refused.value.code == "server_error"
        assert world.keeper.prefixes() == []
        await world.keeper.purge("acme")
        orders = await told(world, node)
        assert [type(order) for order in orders] == [wire.Unpin, wire.Purge]
    await world.keeper.look()  # the disk is well again
    world.restart()
    assert len(await told(world, world.join("n1"))) == 1


async def test_a_node_that_never_came_back_is_forgotten_after_a_year(world: World) -> None:
    await world.keeper.purge("acme")
    world.pass_time(MAX_PURGE_S + 1)
    assert await told(world, world.join("n1")) == []
    world.restart()
    world.wall_s -= MAX_PURGE_S
    assert await told(world, world.join("n1")) == []


async def test_others_have_the_loop_between_engines(world: World) -> None:
    for at in range(20):
        world.join(f"n{at}")
    await world.keeper.purge("t")
    turns = 0

    async def stream() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(stream())
    await world.keeper.look()
    other.cancel()
    assert turns >= 19
