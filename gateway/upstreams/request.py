"""A client's request on its way to an upstream: what we must know of it, and the few edits it gets.

Members that are not edited keep their bytes and their order, known to us or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from gateway.api.sampling_request import (
    UsageOptions,
    invalid,
    least_limit,
    read_stops,
    unsupported,
)
from gateway.api.typed_input import decoded
from gateway.config import LimitsConfig
from gateway.errors import GatewayError
from gateway.upstreams.rewrite import Members
from gateway.upstreams.settings import UpstreamConfig
from policies.affinity import BodyHints

Route = Literal["chat", "text"]
PATHS: dict[Route, str] = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
OBJECTS: dict[Route, str] = {"chat": "chat.completion.chunk", "text": "text_completion"}
ID_PREFIXES: dict[Route, str] = {"chat": "chatcmpl", "text": "cmpl"}
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens", "min_completion_tokens")
OURS = ("usage", "retention_s")  # what only this gateway understands
# What upstreams are told by us alone: another tenant's pages, and servers to fetch pages from.
KEPT_BACK = (
    *("cache_salt", "kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)
CONTINUOUS = "continuous_usage_stats"  # a bill is told once, at its end
BYTES_PER_TOKEN = 2  # a bound for a text that nobody has tokenised
DEFAULT_TEXT_TOKENS = 16  # of /v1/completions

_encode = msgspec.json.Encoder().encode


class RelayBody(Struct, frozen=True):
    """Types only; what is not here is the upstream's to judge."""

    model: str
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    usage: UsageOptions | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    stop: str | list[str] | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[object] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    prompt_cache_key: object = None
    session_id: object = None
    metadata: object = None


class ModelName(Struct, frozen=True):
    model: str = ""


_decode_body = msgspec.json.Decoder(RelayBody).decode
_decode_name = msgspec.json.Decoder(ModelName).decode


def model_of(data: bytes) -> str | None:
    """Which model a body asks for, if it is one at all."""
    try:
        return _decode_name(data).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """choices: how many a client expects. text_bytes: of all that the model will read."""

    route: Route
    body: RelayBody
    members: Members
    choices: int
    num_prompts: int
    is_batch: bool  # prompt is a list of prompts, perhaps of one
    max_tokens: int | None
    text_bytes: int
    hints: BodyHints

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def include_cost(self) -> bool:
        return bool(self.body.usage and self.body.usage.include)

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options or {}
        return options.get("include_usage") is True or self.include_cost

    def headers(self) -> list[tuple[str, str]]:
        """What of it goes no further, or otherwise."""
        changed = [f"{name} dropped" for name in KEPT_BACK if name in self.members]
        if (self.body.stream_options or {}).get(CONTINUOUS):
            changed.append(f"stream_options.{CONTINUOUS} dropped")
        return [("x-kagari-changed", change) for change in changed]

    @property
    def is_one_sequence(self) -> bool:
        """One prompt, one answer, and nothing asked about the prompt's own tokens: only those can
        be handed from one server to another."""
        one = self.choices == 1 and not self.body.echo
        return one and self.body.prompt_logprobs is None and (self.body.best_of or 1) == 1


def read_relay_request(data: bytes, route: Route, limits: LimitsConfig) -> RelayRequest:
    """Decode and check what admission needs; raises GatewayError (400) that names the field."""
    needed = "messages" if route == "chat" else "prompt"
    body = decoded(data, _decode_body, needs=f"model and {needed}")
    members = msgspec.json.decode(data, type=Members)
    text = body.messages if route == "chat" else body.prompt
    if text is None or text == []:
        raise invalid(needed, "nothing" if text is None else "an empty list", "some", "add one")
    read_stops(body.stop, limits)
    choices = 1 if body.n is None else body.n
    if not 1 <= choices <= limits.choices:
        raise invalid("n", str(body.n), f"1 to {limits.choices}", "send the request several times")
    batch = _batch_size(body.prompt, limits)
    num_prompts = 1 if batch is None else batch
    max_tokens = least_limit(
        max_completion_tokens=body.max_completion_tokens,
        max_tokens=body.max_tokens if route == "chat" or body.max_tokens != 0 else None,
    )
    if max_tokens is None and route == "text":
        max_tokens = DEFAULT_TEXT_TOKENS
    return RelayRequest(
        route=route,
        body=body,
        members=members,
        choices=choices * num_prompts,
        num_prompts=num_prompts,
        is_batch=batch is not None,
        max_tokens=max_tokens,
        text_bytes=sum([len(bytes(members.get(name, b""))) for name in (needed, "tools")]),
        hints=BodyHints(body.prompt_cache_key, body.session_id, body.metadata),
    )


def _batch_size(prompt: str | Sequence[object] | None, limits: LimitsConfig) -> int | None:
    """How many prompts a list holds; None for a text, or for the ids of one prompt."""
    if prompt is None or isinstance(prompt, str) or isinstance(prompt[0], int):
        return None
    if len(prompt) > limits.prompts:
        raise invalid("prompt", f"{len(prompt)}", f"at most {limits.prompts}", "send fewer")
    return len(prompt)


def check_able(request: RelayRequest, configs: Sequence[UpstreamConfig]) -> None:
    """Refuse what the upstreams would ignore in silence. Raises GatewayError (400)."""
    body = request.body
    wants = {
        "tools": bool(body.tools),
        "logprobs": body.logprobs not in (None, False),
        "n": (body.n or 1) > 1,
    }
    for field, able in (("tools", "tools"), ("logprobs", "logprobs"), ("n", "choices")):
        if wants[field] and not all(getattr(config, able) for config in configs):
            raise _unable(field)


def _unable(field: str) -> GatewayError:
    return unsupported(
        field, "a model whose upstream cannot do that", "a model that can", "leave it out"
    )


# --- edits ----------------------------------------------------------------------------------------


def edited(request: RelayRequest, config: UpstreamConfig, own_name: str, salt: str) -> Members:
    """The members as this upstream gets them. salt: where it takes one, "" else."""
    members = {
        name: value
        for name, value in request.members.items()
        if name not in OURS and name not in KEPT_BACK
    }
    members["model"] = _raw(own_name)
    if request.stream:
        if config.stream_usage:
            options = {**(request.body.stream_options or {}), "include_usage": True}
            options.pop(CONTINUOUS, None)
            members["stream_options"] = _raw(options)
        else:
            members.pop("stream_options", None)
    if salt:
        members["cache_salt"] = _raw(salt)
    return members


def limited(members: Members, max_tokens: int) -> Members:
    """With no more than so many tokens to produce."""
    names = [name for name in LIMITS[:2] if name in members] or ["max_tokens"]
    return members | {name: _raw(max_tokens) for name in names}


def prefill_only(members: Members) -> Members:
    """vLLM: compute the prompt, keep its blocks for another, answer whole with one token."""
    kept = {
        name: value
        for name, value in members.items()
        if name not in ("stream_options", *LIMITS[2:])
    }
    handed = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    kept |= {"stream": _raw(False), "max_tokens": _raw(1), "kv_transfer_params": _raw(handed)}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = _raw(1)
    return kept


def bootstrapped(
    members: Members, host: str, port: int, rooms: Sequence[int], *, is_batch: bool
) -> Members:
    """SGLang: both servers meet in a room of the prefill server; a batch has one a prompt."""
    fields: dict[str, object] = {
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": rooms[0],
    }
    if is_batch:
        fields = {
            "bootstrap_host": [host] * len(rooms),
            "bootstrap_port": [port] * len(rooms),
            "bootstrap_room": list(rooms),
        }
    return members | {name: _raw(value) for name, value in fields.items()}


def written(members: Members) -> bytes:
    return _encode(members)


def _raw(value: object) -> Raw:
    return Raw(_encode(value))
