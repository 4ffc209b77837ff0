"""One content key names a page everywhere: a SHA-256 chain over token ids, seeded by who may share.

page_key = SHA-256(parent key ‖ ids of one page as u32 little endian). The chain's root is a seed
over (schema version, interchangeable model id, tokenizer digest, page_size, salt), each part framed
by its length so that no two different tuples meet. Keys are 32 bytes; events carry the first 16.
"""

from __future__ import annotations

import hmac
from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import sha256

SCHEMA_VERSION = 1
KEY_BYTES = 32
EVENT_KEY_BYTES = 16
SALT_BYTES = 32
OWNER_BYTES = 16
ID_BYTES = 4


def tenant_salt(home_secret: bytes, tenant: str) -> bytes:
    """The tenant's seed of page keys, 32 bytes; the secret is the fleet's and persists."""
    return hmac.digest(home_secret, tenant.encode(), "sha256")


def owner_tag(salt: bytes) -> bytes:
    """Whose a stored page is, 16 bytes: what a purge finds it by; it tells nothing of the salt."""
    return sha256(b"owner" + salt).digest()[:OWNER_BYTES]


def interchangeable_id(identity: str, compute: str) -> str:
    """Which pages may stand for each other: those of one model, computed alike.

    A page of `--compute fast` is rounded otherwise and may depend on the batch that computed it, so
    none may reach an exact engine: it would not answer a warm prompt as it does a cold one.
    """
    return identity if compute == "exact" else f"{identity}+{compute}"


def seed(*, identity: str, tokenizer_digest: str, page_size: int, salt: bytes) -> bytes:
    """Root of a key chain, 32 bytes. Raises ValueError on a salt of another length."""
    if len(salt) != SALT_BYTES:
        raise ValueError(f"salt has {len(salt)} bytes, want {SALT_BYTES}")
    digest = sha256()
    parts = (
        SCHEMA_VERSION.to_bytes(4, "little"),
        identity.encode(),
        tokenizer_digest.encode(),
        page_size.to_bytes(4, "little"),
        salt,
    )
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def next_key(parent: bytes, page_ids: bytes) -> bytes:
    """Key of the page that holds page_ids (page_size × 4 bytes) after parent."""
    digest = sha256(parent)
    digest.update(page_ids)
    return digest.digest()


def page_keys(root: bytes, ids: bytes, *, page_size: int) -> list[bytes]:
    """Keys of all full pages of ids (u32 little endian), in order; the tail has none."""
    width = page_size * ID_BYTES
    keys: list[bytes] = []
    parent = root
    for start in range(0, len(ids) - width + 1, width):
        parent = next_key(parent, ids[start : start + width])
        keys.append(parent)
    return keys


def resident_pages(keys: Sequence[bytes], is_resident: Callable[[bytes], bool]) -> int:
    """How many leading pages of a chain are resident, by bisection: where chains are admitted root
    first and evicted tail first, a resident page proves all before it."""
    return bisect_left(keys, True, key=lambda key: not is_resident(key))


def max_hit_pages(num_tokens: int, page_size: int) -> int:
    """Most pages a prefix hit may cover: the last token is always computed."""
    return max(0, num_tokens - 1) // page_size
