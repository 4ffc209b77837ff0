"""The ledger's files under home: their names, who may read them, and the one process that writes.

The writer holds a flock for its whole life; the kernel lets go of it however the process ends, so
an open row is alive exactly when the lock is held.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

LEDGER_NAME = "ledger.sqlite3"
KEYS_NAME = "keys.sqlite3"
LOCK_WAIT_S = 1.0  # a verify that looks at the lock holds it for microseconds


class LedgerError(Exception):
    """The ledger's file cannot be used as it is; the message names it and the remedy."""


def make_private(path: Path) -> None:
    """Create the file and its folder for the owner alone, unless they exist."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


def take_writer_lock(ledger: Path) -> int:
    """A file descriptor that holds the lock until it is closed; raises LedgerError when taken."""
    path = _lock_path(ledger)
    make_private(path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            os.close(fd)
            raise LedgerError(
                f"{ledger} has a writer already; stop that gateway or give this one its own --home"
            ) from None
        return fd


def has_writer(ledger: Path) -> bool:
    """Whether a living process writes this ledger now."""
    try:
        fd = os.open(_lock_path(ledger), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection, gateway running or not; all its faults become LedgerErrors."""
    if not path.exists():
        raise LedgerError(f"{path} is absent; start a gateway with this --home first")
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)) as reader:
            yield reader
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: {error}; restore it from a backup") from error


def wal_bytes(path: Path) -> int:
    """The size of the write-ahead log beside a database; 0 when there is none."""
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except FileNotFoundError:
        return 0


def _lock_path(ledger: Path) -> Path:
    return ledger.with_name(ledger.name + ".lock")
