"""The ledger's tables and the few statements that change them.

The trigger moves a row's settled figures into the rollups inside the very UPDATE that settles it,
so rows and rollups cannot disagree, whoever settles: a request, or the next boot for a dead one.
Token and charge columns hold what is *billed*: zero while open and after a failure of ours, so
that charge = tokens x rates holds on every row.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from gateway.ledger.files import LedgerError, make_private
from gateway.ledger.migrate import migrate

APPLICATION_ID = 0x4B474C44  # "KGLD"
JOURNAL_BYTES = 8 << 20  # a truncated write-ahead log keeps at most this

SCHEMA = (
    """CREATE TABLE boots (
        boot INTEGER PRIMARY KEY,
        pid INTEGER NOT NULL,
        started_at REAL NOT NULL
    ) STRICT""",
    """CREATE TABLE requests (
        sequence INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL UNIQUE,
        boot INTEGER NOT NULL REFERENCES boots,
        tenant TEXT NOT NULL,
        key_id TEXT NOT NULL,
        model TEXT NOT NULL,
        status TEXT NOT NULL DEFAULT 'open'
            CHECK (status IN ('open', 'ok', 'client_left', 'failed', 'orphaned')),
        quality TEXT CHECK (quality IN ('exact', 'partial', 'estimated')),
        path TEXT NOT NULL,
        node TEXT,
        prefill_node TEXT,
        admitted_prompt_tokens INTEGER NOT NULL CHECK (admitted_prompt_tokens >= 0),
        prompt_tokens INTEGER NOT NULL DEFAULT 0,
        cached_tokens INTEGER NOT NULL DEFAULT 0
            CHECK (cached_tokens BETWEEN 0 AND prompt_tokens),
        completion_tokens INTEGER NOT NULL DEFAULT 0 CHECK (completion_tokens >= 0),
        charge_nano_usd INTEGER NOT NULL DEFAULT 0 CHECK (charge_nano_usd >= 0),
        saved_nano_usd INTEGER NOT NULL DEFAULT 0 CHECK (saved_nano_usd >= 0),
        rate_input INTEGER NOT NULL,
        rate_cached INTEGER NOT NULL,
        rate_output INTEGER NOT NULL,
        price_version TEXT NOT NULL,
        policy_version TEXT NOT NULL,
        started_at REAL NOT NULL,
        ended_at REAL,
        day TEXT,
        ttft_s REAL,
        tiers TEXT NOT NULL DEFAULT '{}',
        attempts TEXT NOT NULL DEFAULT '[]',
        session_digest BLOB,
        page_digest BLOB
    ) STRICT""",
    "CREATE INDEX open_requests ON requests (boot) WHERE status = 'open'",
    """CREATE TABLE rollups (
        day TEXT NOT NULL,
        tenant TEXT NOT NULL,
        key_id TEXT NOT NULL,
        model TEXT NOT NULL,
        requests INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        charge_nano_usd INTEGER NOT NULL,
        saved_nano_usd INTEGER NOT NULL,
        PRIMARY KEY (day, tenant, key_id, model)
    ) STRICT, WITHOUT ROWID""",
    """CREATE TRIGGER roll_up AFTER UPDATE OF status ON requests
    WHEN old.status = 'open' AND new.status <> 'open' BEGIN
        INSERT INTO rollups VALUES (
            new.day, new.tenant, new.key_id, new.model, 1,
            new.status IN ('failed', 'orphaned'), new.prompt_tokens, new.cached_tokens,
            new.completion_tokens, new.charge_nano_usd, new.saved_nano_usd
        ) ON CONFLICT DO UPDATE SET
            requests = requests + 1,
            failed = failed + excluded.failed,
            prompt_tokens = prompt_tokens + excluded.prompt_tokens,
            cached_tokens = cached_tokens + excluded.cached_tokens,
            completion_tokens = completion_tokens + excluded.completion_tokens,
            charge_nano_usd = charge_nano_usd + excluded.charge_nano_usd,
            saved_nano_usd = saved_nano_usd + excluded.saved_nano_usd;
    END""",
)
# Not unique: a retry may open its row while the failed one before it still waits for the disk to
# settle, and a batch that one row breaks would be refused whole. `verify` counts instead.
IDEMPOTENCY = (
    "ALTER TABLE requests ADD COLUMN idempotency_digest BLOB",
    """CREATE INDEX idempotent_requests ON requests (idempotency_digest)
    WHERE idempotency_digest IS NOT NULL""",
    "CREATE INDEX rollups_by_key ON rollups (key_id, day)",
)
# Each index ends in the row's sequence, so a filter finds its rows newest first. Rows that are `ok`
# are most of them: they have no entry by status, and open ones are in open_requests.
FILTERS = (
    "CREATE INDEX requests_by_key ON requests (key_id)",
    "CREATE INDEX requests_by_model ON requests (model)",
    "CREATE INDEX requests_by_tenant ON requests (tenant)",
    "CREATE INDEX requests_by_ending ON requests (status) WHERE status NOT IN ('open', 'ok')",
)
MIGRATIONS = (SCHEMA, IDEMPOTENCY, FILTERS)

# Not INSERT OR IGNORE, which would also swallow a broken CHECK.
OPEN = """INSERT INTO requests (
    request_id, boot, tenant, key_id, model, path, node, admitted_prompt_tokens,
    rate_input, rate_cached, rate_output, price_version, policy_version, started_at,
    session_digest, page_digest, idempotency_digest
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (request_id) DO NOTHING"""

SETTLE = """UPDATE requests SET
    status = ?, quality = ?, path = ?, node = ?, prefill_node = ?,
    prompt_tokens = ?, cached_tokens = ?, completion_tokens = ?,
    charge_nano_usd = ?, saved_nano_usd = ?, ended_at = ?, day = date(?, 'unixepoch'), ttft_s = ?,
    tiers = ?, attempts = ?
WHERE request_id = ? AND status = 'open'"""

ORPHAN = """UPDATE requests SET
    status = 'orphaned', quality = 'estimated', ended_at = ?, day = date(?, 'unixepoch')
WHERE status = 'open'"""

# Changes nothing, yet is a write: tells whether a disk that was full is well again.
PROBE = "UPDATE boots SET pid = pid WHERE boot = ?"


def prepare(path: Path, now: float) -> int:
    """Create or migrate the file and settle what dead processes left open; the new boot's number.

    The caller holds the writer lock. Raises LedgerError for a file that this build cannot use.
    """
    make_private(path)
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = FULL")
        migrate(connection, path, MIGRATIONS, APPLICATION_ID)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(ORPHAN, (now, now))
        boot = connection.execute(
            "INSERT INTO boots (pid, started_at) VALUES (?, ?)", (os.getpid(), now)
        ).lastrowid
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise LedgerError(
            f"{path}: {error}; free disk space, or restore it from a backup"
        ) from error
    finally:
        connection.close()
    assert boot is not None
    return boot
