"""Keys for the operator: list, create, show, change, revoke. A secret is in one answer only.

Changes run on a connection of their own in a thread, because each waits for the disk; the
gateway's own book of keys looks again before the answer goes out, so that it holds from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.admin.paging import After, Limit, read_cursor, write_cursor
from gateway.api.exchange import Exchange
from gateway.api.typed_input import decoded, read_query, refuse_field
from gateway.errors import GatewayError
from gateway.ledger.files import KEYS_NAME, LedgerError
from gateway.ledger.keys import MAX_NAME, MAX_TTFT_DEADLINE_MS, Key, KeyRefused, Keys
from gateway.services import Services

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
TtftDeadline = Annotated[int, Meta(ge=1, le=MAX_TTFT_DEADLINE_MS)]
Done = TypeVar("Done")
CODE_BY_REASON = {"invalid": "invalid_request", "taken": "key_exists", "unknown": "key_not_found"}


class KeysQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Limit = 100
    after: After | None = None


class KeyList(Struct, frozen=True):
    """Keys, revoked ones too, oldest first. next: None at the end."""

    keys: tuple[Key, ...]
    next: str | None


class NewKey(Struct, frozen=True, forbid_unknown_fields=True):
    """Printable characters; no live key may have the name. ttft_deadline_ms: requests whose first
    token would come later are refused; None: as the gateway's settings say."""

    name: Name
    tenant: Name = "default"
    ttft_deadline_ms: TtftDeadline | None = None


class KeyChange(Struct, frozen=True, forbid_unknown_fields=True):
    """What is not there stays as it is."""

    name: Name | UnsetType = UNSET
    ttft_deadline_ms: TtftDeadline | UnsetType | None = UNSET


class CreatedKey(Key, frozen=True, kw_only=True):
    """A new key and its secret, which nobody can show again."""

    secret: str


_new_key = msgspec.json.Decoder(NewKey).decode
_key_change = msgspec.json.Decoder(KeyChange).decode


async def list_keys(services: Services, exchange: Exchange) -> None:
    """List keys, revoked ones too, oldest first."""
    query = read_query(exchange, KeysQuery)
    after = None if query.after is None else read_cursor(query.after, tuple[float, str])
    found = await change_keys(services, lambda keys: keys.list_after(after, query.limit + 1))
    keys = tuple(found[: query.limit])
    is_last = len(found) == len(keys)
    cursor = None if is_last else write_cursor((keys[-1].created_at, keys[-1].key_id))
    await exchange.reply_json(KeyList(keys, cursor))


async def create_key(services: Services, exchange: Exchange) -> None:
    """Create a key; its secret is in this answer and nowhere else."""
    new = decoded(exchange.body, _new_key, needs="a name")
    key, secret = await change_keys(
        services,
        lambda keys: keys.create(new.name, new.tenant, ttft_deadline_ms=new.ttft_deadline_ms),
    )
    exchange.notes["key_id"] = key.key_id
    created = CreatedKey(**msgspec.structs.asdict(key), secret=secret)
    await exchange.reply_json(created, status=201, headers=[("cache-control", "no-store")])


async def show_key(services: Services, exchange: Exchange) -> None:
    """Show a key by its id, or a live one by its name."""
    name = exchange.parameters["key"]
    await exchange.reply_json(await change_keys(services, lambda keys: keys.get(name)))


async def change_key(services: Services, exchange: Exchange) -> None:
    """Give a live key another name or deadline of first tokens; its id and its secret stay."""
    asked = decoded(exchange.body, _key_change, needs="a name or a ttft_deadline_ms")
    if asked == KeyChange():
        raise refuse_field("body", "nothing to change", "name, ttft_deadline_ms", "send one")
    name = exchange.parameters["key"]

    def change(keys: Keys) -> Key:
        key = keys.get(name)
        if asked.name is not UNSET:  # it may be taken, and then nothing is changed
            key = keys.rename(key.key_id, asked.name)
        if asked.ttft_deadline_ms is not UNSET:
            key = keys.set_ttft_deadline(key.key_id, asked.ttft_deadline_ms)
        return key

    await _answer(services, exchange, change)


async def revoke_key(services: Services, exchange: Exchange) -> None:
    """End a key; one that has ended already stays as it is."""
    name = exchange.parameters["key"]

    def revoke(keys: Keys) -> Key:
        key = keys.get(name)
        return key if key.revoked_at is not None else keys.revoke(key.key_id)

    await _answer(services, exchange, revoke)


async def _answer(services: Services, exchange: Exchange, change: Callable[[Keys], Key]) -> None:
    key = await change_keys(services, change)
    exchange.notes["key_id"] = key.key_id
    await exchange.reply_json(key)


async def change_keys(services: Services, work: Callable[[Keys], Done]) -> Done:
    """Raises GatewayError for what the book of keys refuses."""

    def in_thread() -> Done:
        with Keys(services.home.folder / KEYS_NAME) as keys:
            return work(keys)

    try:
        done = await asyncio.to_thread(in_thread)
    except KeyRefused as refused:
        raise GatewayError(
            CODE_BY_REASON[refused.reason],
            field=refused.field,
            found=refused.found,
            allowed=refused.allowed,
            remedy=refused.remedy,
        ) from None
    except LedgerError as error:
        services.log.error("keys_unreadable", error=str(error))
        raise GatewayError(
            "ledger_unreadable",
            found="a book of keys that cannot be used now",
            allowed="an answer within seconds",
            remedy="send the request again; the gateway's log has the reason",
            retry_after_s=1.0,
        ) from None
    services.keys.refresh()
    return done
