"""What a Submit must be before it becomes sequences: refuse what is impossible or not supported."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

import msgspec

from engine.schedule.events import SequenceRefused
from policies.contract.page_keys import ID_BYTES, SALT_BYTES
from policies.contract.wire import (
    LARGEST_PENALTY,
    MAX_LANES,
    Pin,
    Sampling,
    Submit,
    Transfer,
    decode_transfer,
    unpack_ids,
)

MAX_TOP_LOGPROBS = 64
TRANSFER_ID_BYTES = 16
TRANSFER_SECRET_BYTES = 32


def check_submit(
    submit: Submit, vocab_size: int, *, draining: bool, moves: bool
) -> tuple[array[int], Transfer | None]:
    """The prompt's token ids, and how it is split. moves: pages can go to other engines, and come.
    Raises SequenceRefused with a code from docs/errors.md."""
    if draining:
        raise SequenceRefused(
            "draining", "engine: found draining, allowed ready; send the request to another node"
        )
    for fault in _faults(submit, submit.sampling, vocab_size):
        raise SequenceRefused("invalid_submit", fault)
    if submit.grammar is not None:
        raise SequenceRefused(
            "unsupported",
            f"grammar: found {submit.grammar!r}, allowed None; this engine cannot do it yet",
        )
    prompt = _check_prompt(submit.prompt, submit.salt, vocab_size)
    return prompt, _check_transfer(submit, moves=moves)


def _check_transfer(submit: Submit, *, moves: bool) -> Transfer | None:
    if submit.role == "mixed" and submit.transfer is None:
        return None
    try:
        transfer = decode_transfer(submit.transfer or b"")
    except msgspec.MsgspecError as error:
        raise SequenceRefused(
            "invalid_submit",
            f"transfer: found {error}, allowed an encoded Transfer beside role {submit.role}; send "
            "it so",
        ) from error
    for fault in _split_faults(submit, transfer):
        raise SequenceRefused("invalid_submit", fault)
    if not moves:
        raise SequenceRefused(
            "transfer_refused",
            f"role: found {submit.role}, allowed mixed on an engine that takes no part in "
            "transfers; start it without --peer-port none",
        )
    return transfer


def _split_faults(submit: Submit, transfer: Transfer) -> Iterator[str]:
    """What no split can mean."""
    if submit.role == "mixed":
        yield "transfer: found one with role mixed, allowed with prefill or decode; leave it out"
    if len(submit.lanes) != 1:
        yield f"lanes: found {len(submit.lanes)}, allowed 1 of a split; send it with role mixed"
    connects = submit.role == "prefill" or transfer.return_id
    if connects and not transfer.peer.rpartition(":")[2].isdecimal():
        yield f"peer: found {transfer.peer!r}, allowed HOST:PORT; send the other engine's"
    if transfer.transfer_id == transfer.return_id:
        yield "return_id: found the transfer's own, allowed another; draw each at random"
    pairs = [("transfer_id", "secret")]
    if transfer.return_id or transfer.return_secret:
        pairs.append(("return_id", "return_secret"))
    for pair in pairs:
        for name, size in zip(pair, (TRANSFER_ID_BYTES, TRANSFER_SECRET_BYTES), strict=True):
            if len(found := getattr(transfer, name)) != size:
                yield f"{name}: found {len(found)} bytes, allowed {size}; draw so many at random"


def check_pin(pin: Pin, vocab_size: int, *, draining: bool) -> array[int]:
    """The prompt's token ids. Raises SequenceRefused with a code from docs/errors.md."""
    if draining:
        raise SequenceRefused("draining", "engine: found draining, allowed ready; pin elsewhere")
    if not 0.0 < pin.ttl_s < math.inf:
        raise SequenceRefused(
            "invalid_submit", f"ttl_s: found {pin.ttl_s}, allowed seconds above 0; send such a time"
        )
    return _check_prompt(pin.prompt, pin.salt, vocab_size)


def _check_prompt(data: bytes, salt: bytes, vocab_size: int) -> array[int]:
    if len(salt) != SALT_BYTES:
        raise SequenceRefused(
            "invalid_submit",
            f"salt: found {len(salt)} bytes, allowed {SALT_BYTES}; send the tenant's salt",
        )
    if len(data) % ID_BYTES:
        raise SequenceRefused(
            "invalid_submit",
            f"prompt: found {len(data)} bytes, allowed a multiple of {ID_BYTES}; "
            "send u32 little endian ids",
        )
    prompt = unpack_ids(data)
    if prompt and max(prompt) >= vocab_size:
        raise SequenceRefused(
            "invalid_submit",
            f"prompt: found token id {max(prompt)}, allowed below {vocab_size}; "
            "tokenise with this model's bundle",
        )
    return prompt


def _faults(submit: Submit, sampling: Sampling, vocab_size: int) -> Iterator[str]:
    """What no request can mean."""
    if len(submit.lanes) > MAX_LANES:
        yield f"lanes: found {len(submit.lanes)}, allowed {MAX_LANES} at most; ask for fewer"
    if submit.retention_s is not None and not 0.0 <= submit.retention_s < math.inf:
        yield f"retention_s: found {submit.retention_s}, allowed seconds from 0; send such a time"
    if math.isnan(submit.deadline_s):
        yield "deadline_s: found NaN, allowed seconds; send a number"
    if sampling.prompt_logprobs is not None and submit.role != "mixed":
        yield (
            f"prompt_logprobs: found with role {submit.role}, allowed with role mixed, because one "
            "engine has to compute the whole prompt; send it so"
        )
    for name, least, most in (
        ("max_tokens", 1, math.inf),
        ("min_tokens", 0, math.inf),
        ("temperature", 0.0, LARGEST_PENALTY),
        ("top_p", 0.0, 1.0),
        ("top_k", 0, math.inf),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -LARGEST_PENALTY, LARGEST_PENALTY),
        ("frequency_penalty", -LARGEST_PENALTY, LARGEST_PENALTY),
        ("repetition_penalty", 1 / LARGEST_PENALTY, LARGEST_PENALTY),
        ("logprobs", 0, MAX_TOP_LOGPROBS),
        ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
    ):
        found = getattr(sampling, name)
        if found is not None and not least <= found <= most:
            yield f"{name}: found {found}, allowed {least:g} to {most:g}; send such a value"
    before = -1
    for token, bias in sampling.logit_bias:
        if not before < token < vocab_size:
            yield (
                f"logit_bias: found token id {token} after {before}, allowed ascending ids below "
                f"{vocab_size}; send ids of this model's tokenizer, each once"
            )
        if not abs(bias) <= LARGEST_PENALTY:
            yield (
                f"logit_bias: found {bias} for token id {token}, allowed {-LARGEST_PENALTY:g} to "
                f"{LARGEST_PENALTY:g}; send such a value"
            )
        before = token
