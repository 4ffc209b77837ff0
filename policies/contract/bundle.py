"""The tokenizer bundle: all a gateway needs to turn a model's text into token ids and back."""

from __future__ import annotations

from hashlib import sha256

import msgspec
from msgspec import Struct


class Bundle(Struct, frozen=True):
    """Published by nodes, cached by gateways, named by the digest of its encoding."""

    tokenizer_json: bytes  # a Hugging Face tokenizers file
    chat_template: str | None  # jinja2; None: the model answers chat with 400
    bos_token: str | None
    eos_token: str | None
    stop_token_ids: tuple[int, ...]  # ids that end a completion
    add_bos: bool  # prepend bos to a raw prompt
    context_tokens: int
    page_size: int
    vocab_size: int
    parser_family: str | None = None  # tool-call form, e.g. "hermes"
    labels: tuple[str, ...] = ()  # shown to users, e.g. "protocol demo"


def encode_bundle(bundle: Bundle) -> bytes:
    return msgspec.msgpack.encode(bundle, order="deterministic")


def decode_bundle(data: bytes) -> Bundle:
    """Raises msgspec.ValidationError when data is not a bundle."""
    return msgspec.msgpack.decode(data, type=Bundle)


def bundle_digest(encoded: bytes) -> str:
    return sha256(encoded).hexdigest()


def tokenizer_digest(tokenizer_json: bytes) -> str:
    return sha256(tokenizer_json).hexdigest()
