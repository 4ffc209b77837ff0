"""What a Submit must be before it becomes sequences: refuse what is impossible or not supported."""

from __future__ import annotations

import math
from array import array

from engine.schedule.events import SequenceRefused
from policies.contract.page_keys import ID_BYTES, SALT_BYTES
from policies.contract.wire import Submit, unpack_ids


def check_submit(submit: Submit, vocab_size: int, *, draining: bool) -> array[int]:
    """The prompt's token ids. Raises SequenceRefused with a code from docs/errors.md."""
    if draining:
        raise SequenceRefused(
            "draining", "engine: found draining, allowed ready; send the request to another node"
        )
    for field, found, allowed in (
        ("role", submit.role, "mixed"),
        ("grammar", submit.grammar, None),
        ("transfer", submit.transfer, None),
    ):
        if found != allowed:
            raise SequenceRefused(
                "unsupported",
                f"{field}: found {found!r}, allowed {allowed!r}; this engine cannot do it yet",
            )
    if len(submit.salt) != SALT_BYTES:
        raise SequenceRefused(
            "invalid_submit",
            f"salt: found {len(submit.salt)} bytes, allowed {SALT_BYTES}; send the tenant's salt",
        )
    if math.isnan(submit.deadline_s):
        raise SequenceRefused(
            "invalid_submit", "deadline_s: found NaN, allowed seconds; send a number"
        )
    if len(submit.prompt) % ID_BYTES:
        raise SequenceRefused(
            "invalid_submit",
            f"prompt: found {len(submit.prompt)} bytes, allowed a multiple of {ID_BYTES}; "
            "send u32 little endian ids",
        )
    prompt = unpack_ids(submit.prompt)
    if prompt and max(prompt) >= vocab_size:
        raise SequenceRefused(
            "invalid_submit",
            f"prompt: found token id {max(prompt)}, allowed below {vocab_size}; "
            "tokenise with this model's bundle",
        )
    return prompt
