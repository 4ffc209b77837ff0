"""API keys: digests in a small SQLite file, looked up in memory, shown once.

Another process may create or revoke keys while a gateway runs: `find` asks SQLite at most twice a
second whether another connection has changed the file, and then reads it again.
"""

from __future__ import annotations

import builtins
import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import structlog
from msgspec import Struct

from gateway.errors import quote
from gateway.ledger.files import LedgerError, make_private
from gateway.ledger.migrate import migrate

APPLICATION_ID = 0x4B474B59  # "KGKY"
SECRET_PREFIX = "kg-"
SECRET_BYTES = 32
MIN_LITERAL = 16
MAX_NAME = 64
MAX_TTFT_DEADLINE_MS = 3_600_000
LOOK_EVERY_S = 0.5
MIGRATIONS = (
    (
        """CREATE TABLE keys (
            key_id TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            tenant TEXT NOT NULL,
            digest BLOB NOT NULL UNIQUE,
            created_at REAL NOT NULL,
            revoked_at REAL
        ) STRICT""",
        "CREATE UNIQUE INDEX live_names ON keys (name) WHERE revoked_at IS NULL",
    ),
    ("CREATE INDEX keys_by_age ON keys (created_at, key_id)",),
    ("ALTER TABLE keys ADD COLUMN ttft_deadline_ms INTEGER",),
)
COLUMNS = "key_id, name, tenant, created_at, revoked_at, ttft_deadline_ms"

log = structlog.get_logger("kagari.keys")


class KeyRefused(ValueError):
    """A key that cannot be made, renamed or found, in the four parts of an error."""

    def __init__(
        self,
        reason: Literal["invalid", "taken", "unknown"],
        field: str,
        *,
        found: str,
        allowed: str,
        remedy: str,
    ) -> None:
        super().__init__(f"{field}: found {found}; allowed {allowed}; {remedy}")
        self.reason = reason
        self.field, self.found, self.allowed, self.remedy = field, found, allowed, remedy


class Key(Struct, frozen=True):
    """A key without its secret, of which only a digest is kept. Times are wall seconds.

    ttft_deadline_ms: a request whose first token would come later is refused; None: as
    `limits.ttft_deadline_ms` says.
    """

    key_id: str
    name: str
    tenant: str
    created_at: float
    revoked_at: float | None = None
    ttft_deadline_ms: int | None = None


class Keys:
    """The keys of one home. Every call is quick and synchronous; use it from one thread."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        make_private(path)
        self._path = path
        self._clock = clock
        self._look_at = 0.0
        self._key_by_digest: dict[bytes, Key] = {}
        self._literal_by_digest: dict[bytes, Key] = {}
        self._connection = sqlite3.connect(path, timeout=2.0, isolation_level=None)
        try:
            self._connection.execute("PRAGMA synchronous = FULL")
            migrate(self._connection, path, MIGRATIONS, APPLICATION_ID)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._version = self._data_version()
            self._load()
        except sqlite3.Error as error:
            self._connection.close()
            raise LedgerError(f"{path}: {error}; restore it from a backup") from error
        except BaseException:
            self._connection.close()
            raise

    def create(
        self, name: str, tenant: str = "default", *, ttft_deadline_ms: int | None = None
    ) -> tuple[Key, str]:
        """A new key and its secret, which nobody can show again. The name must not be in use."""
        _check_text("name", name, at_least=1)
        _check_text("tenant", tenant, at_least=1)
        _check_deadline(ttft_deadline_ms)
        secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        key = Key(
            f"key_{secrets.token_hex(8)}",
            name,
            tenant,
            time.time(),
            ttft_deadline_ms=ttft_deadline_ms,
        )
        self._change(
            "INSERT INTO keys (key_id, name, tenant, digest, created_at, ttft_deadline_ms)"
            " VALUES (?, ?, ?, ?, ?, ?) RETURNING " + COLUMNS,
            (key.key_id, name, tenant, _digest(secret), key.created_at, ttft_deadline_ms),
            name=name,
        )
        return key, secret

    def list(self) -> list[Key]:
        """All keys, revoked ones too, oldest first."""
        rows = self._connection.execute(f"SELECT {COLUMNS} FROM keys ORDER BY created_at, key_id")
        return [Key(*row) for row in rows]

    def list_after(self, after: tuple[float, str] | None, limit: int) -> builtins.list[Key]:
        """The next `limit` keys after that (created_at, key_id), revoked ones too."""
        rows = self._connection.execute(
            f"SELECT {COLUMNS} FROM keys WHERE (created_at, key_id) > (?, ?)"
            " ORDER BY created_at, key_id LIMIT ?",
            (*(after or (float("-inf"), "")), limit),
        )
        return [Key(*row) for row in rows]

    def get(self, name_or_id: str) -> Key:
        """A key by its id, revoked or not, or a live one by its name. Raises KeyRefused."""
        row = self._connection.execute(
            f"SELECT {COLUMNS} FROM keys"
            " WHERE key_id = ? OR (name = ? AND revoked_at IS NULL) ORDER BY key_id <> ? LIMIT 1",
            (name_or_id, name_or_id, name_or_id),  # one's name may be another's id: the id counts
        ).fetchone()
        if row is None:
            raise _unknown(name_or_id)
        return Key(*row)

    def rename(self, key_id: str, name: str) -> Key:
        """Give a live key another name, which must not be in use."""
        _check_text("name", name, at_least=1)
        changed = self._change(
            f"UPDATE keys SET name = ? WHERE revoked_at IS NULL AND key_id = ? RETURNING {COLUMNS}",
            (name, key_id),
            name=name,
        )
        if changed is None:
            raise _unknown(key_id)
        return changed

    def set_ttft_deadline(self, key_id: str, milliseconds: int | None) -> Key:
        """Of a live key, for requests that come from now on, in other processes within a second."""
        _check_deadline(milliseconds)
        changed = self._change(
            "UPDATE keys SET ttft_deadline_ms = ? WHERE revoked_at IS NULL AND key_id = ?"
            f" RETURNING {COLUMNS}",
            (milliseconds, key_id),
            name=key_id,
        )
        if changed is None:
            raise _unknown(key_id)
        return changed

    def revoke(self, name_or_id: str) -> Key:
        """Ends a live key, here at once and in other processes within a second."""
        changed = self._change(
            "UPDATE keys SET revoked_at = ?2 WHERE revoked_at IS NULL AND key_id ="
            " coalesce((SELECT key_id FROM keys WHERE key_id = ?1 AND revoked_at IS NULL),"
            " (SELECT key_id FROM keys WHERE name = ?1 AND revoked_at IS NULL))"
            f" RETURNING {COLUMNS}",
            (name_or_id, time.time()),
            name=name_or_id,
        )
        if changed is None:
            raise _unknown(name_or_id)
        return changed

    def _change(self, sql: str, values: tuple[object, ...], *, name: str) -> Key | None:
        """One statement that returns the key it changed; None when it found none."""
        try:
            row = self._connection.execute(sql, values).fetchone()
        except sqlite3.OperationalError as error:
            raise LedgerError(f"{self._path}: {error}; free space on its disk") from error
        except sqlite3.IntegrityError:
            raise KeyRefused(
                "taken",
                "name",
                found=f"{quote(name)}, a live key already",
                allowed="a name that no live key has",
                remedy="choose another or revoke that one",
            ) from None
        self._load()
        return None if row is None else Key(*row)

    def find(self, secret: str) -> Key | None:
        """The live key of a secret. Its digest is looked up, so timing tells nothing of others."""
        now = self._clock()
        if now >= self._look_at:
            self._look_again(now)
        digest = _digest(secret)
        return self._key_by_digest.get(digest) or self._literal_by_digest.get(digest)

    def import_literal(self, secret: str) -> Key:
        """Accept any printable string as a key of tenant `default` while this process lives.

        Its id comes from its digest, so its ledger rows have the same key after a restart.
        """
        _check_text("api key", secret, at_least=MIN_LITERAL, at_most=4096)
        digest = _digest(secret)
        key = Key(f"key_{digest.hex()[:16]}", "api-key", "default", time.time())
        return self._literal_by_digest.setdefault(digest, key)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def refresh(self) -> None:
        """See now what another connection changed."""
        self._look_again(self._clock())

    def _look_again(self, now: float) -> None:
        self._look_at = now + LOOK_EVERY_S
        try:
            if (version := self._data_version()) != self._version:
                self._load()
                self._version = version
        except sqlite3.Error as error:  # the keys that are known still hold
            log.error("keys_unreadable", error=str(error))

    def _load(self) -> None:
        self._look_at = self._clock() + LOOK_EVERY_S
        rows = self._connection.execute(
            f"SELECT digest, {COLUMNS} FROM keys WHERE revoked_at IS NULL"
        )
        self._key_by_digest = {digest: Key(*rest) for digest, *rest in rows}

    def _data_version(self) -> int:
        version: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
        return version


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _check_text(field: str, text: str, *, at_least: int, at_most: int = MAX_NAME) -> None:
    if not at_least <= len(text) <= at_most or not text.isprintable():
        raise KeyRefused(
            "invalid",
            field,
            found=f"{len(text)} characters"
            + ("" if text.isprintable() else ", some of them not printable"),
            allowed=f"{at_least} to {at_most} printable characters",
            remedy=f"choose another {field}",
        )


def _check_deadline(milliseconds: int | None) -> None:
    if milliseconds is not None and not 1 <= milliseconds <= MAX_TTFT_DEADLINE_MS:
        raise KeyRefused(
            "invalid",
            "ttft_deadline_ms",
            found=str(milliseconds),
            allowed=f"1 to {MAX_TTFT_DEADLINE_MS} milliseconds, or none",
            remedy="choose another deadline",
        )


def _unknown(name_or_id: str) -> KeyRefused:
    return KeyRefused(
        "unknown",
        "key",
        found=quote(name_or_id),
        allowed="a live key's name or a key's id",
        remedy="see `kagari keys list`",
    )
