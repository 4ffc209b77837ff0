"""Which pages may stand for each other: those that one arithmetic made of the same weights."""

from __future__ import annotations

from hashlib import sha256

from policies.contract.page_keys import interchangeable_id
from policies.contract.wire import Compute


def page_kind(
    *,
    identity: str,
    compute: Compute,
    tokenizer_digest: str,
    weights_digest: str,
    layout_id: str,
    arithmetic: str,
) -> str:
    """16 hex digits. A page of an equal kind and key is the one that would be computed here, to the
    last bit; a layout alone says what its bytes mean, and a key which tokens they are of."""
    parts = (
        interchangeable_id(identity, compute),
        tokenizer_digest,
        weights_digest,
        layout_id,
        arithmetic,
    )
    return sha256("\0".join(parts).encode()).hexdigest()[:16]
