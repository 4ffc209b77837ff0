"""`kagari keys`: create, list and revoke keys in the home's file, gateway running or not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from gateway.cli.home import home_folder, prepare_home
from gateway.cli.problem import FAILED, Problem
from gateway.ledger.files import KEYS_NAME, LedgerError
from gateway.ledger.keys import Key, KeyRefused, Keys


@contextmanager
def opened(home: Path | None) -> Iterator[Keys]:
    """The keys of this home; what the store refuses becomes a Problem."""
    folder = prepare_home(home_folder(home))
    try:
        with Keys(folder / KEYS_NAME) as keys:
            yield keys
    except KeyRefused as error:
        raise Problem(
            error.field,
            found=error.found,
            allowed=error.allowed,
            remedy=error.remedy,
            exit_code=FAILED,
        ) from error
    except LedgerError as error:
        raise Problem(
            "keys",
            found=str(error),
            allowed="the key file of a home that this user can write",
            remedy="pass --home DIR or set KAGARI_HOME",
            exit_code=FAILED,
        ) from error


def create_key(name: str, *, home: Path | None, as_json: bool) -> None:
    with opened(home) as keys:
        key, secret = keys.create(name)
    if as_json:
        write_json({**shown(key), "secret": secret})
        return
    sys.stdout.write(f"{key.key_id}  {key.name}\n{secret}\nThe secret is not shown again.\n")


def list_keys(*, home: Path | None, as_json: bool) -> None:
    with opened(home) as keys:
        found = keys.list()
    if as_json:
        write_json([shown(key) for key in found])
        return
    from gateway.cli.tables import plain_table, print_table

    table = plain_table("id", "name", "tenant", "created", "revoked")
    for key in found:
        table.add_row(key.key_id, key.name, key.tenant, when(key.created_at), when(key.revoked_at))
    print_table(table)


def revoke_key(name: str, *, home: Path | None, as_json: bool) -> None:
    with opened(home) as keys:
        key = keys.revoke(name)
    if as_json:
        write_json(shown(key))
        return
    sys.stdout.write(f"revoked {key.key_id}  {key.name}\n")


def shown(key: Key) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(key)
    return fields


def when(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
