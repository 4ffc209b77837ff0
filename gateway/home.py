"""The gateway's own folder: tokens and secrets made at the first start, readable by the owner only.

addresses.json says where a running gateway listens, for the commands of the same owner.
admin.token opens the admin listener, join.token lets nodes dial in, home.secret seeds the tenants'
page-key salts and the session digests. home.secret must be backed up and shared by a fleet.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from policies.contract.page_keys import tenant_salt

SECRET_BYTES = 32
ADDRESSES_NAME = "addresses.json"


@dataclass(frozen=True, slots=True)
class Home:
    folder: Path
    admin_token: str
    join_token: str
    secret: bytes
    gateway_id: str

    def salt(self, tenant: str) -> bytes:
        """The tenant's seed of page keys, 32 bytes."""
        return _tenant_salt(self.secret, tenant)

    def salted(self, digest: bytes) -> bytes:
        """A digest as the ledger keeps it, 16 bytes: rows alone identify nothing."""
        return blake2b(digest, digest_size=16, key=self.secret).digest()


_tenant_salt = lru_cache(1024)(tenant_salt)  # asked for with each request


def open_home(
    folder: Path, *, gateway_id: str | None = None, join_token: str | None = None
) -> Home:
    """Create what is missing, read the rest; raises OSError when the folder cannot be used."""
    folder = folder.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Home(
        folder=folder,
        admin_token=_kept(folder / "admin.token"),
        join_token=join_token or _kept(folder / "join.token"),
        secret=bytes.fromhex(_kept(folder / "home.secret")),
        gateway_id=gateway_id or "g-" + _kept(folder / "gateway.id")[:12],
    )


@contextmanager
def told_addresses(folder: Path, **urls: str) -> Iterator[None]:
    """Keep the addresses in home while the block runs; a killed process leaves them behind."""
    path = folder / ADDRESSES_NAME
    draft = folder / f".{ADDRESSES_NAME}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"pid": os.getpid(), **urls}, file)
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _kept(path: Path) -> str:
    """The file's text. Two processes that start at once agree: only one link() can succeed."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(SECRET_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, path)
            except FileExistsError:
                return path.read_text().strip()  # the other process was first; its secret counts
        finally:
            draft.unlink()
    return path.read_text().strip()
