"""POST /tokenize and /detokenize: the very ids that generation would see; free, and no row.

    {"model", "prompt", "add_special_tokens"?}           as /v1/completions would read it
    {"model", "messages", "add_generation_prompt"?}      as /v1/chat/completions would

Both count as a request against a key's rate and concurrency, because text costs the gateway.
"""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec import Struct

from gateway.api.body import ClientLeft
from gateway.api.chat_request import ChatMessage, read_messages
from gateway.api.completion_begin import enter, find_served, tokenised
from gateway.api.exchange import Exchange
from gateway.api.models import window_of
from gateway.api.off_loop import off_loop
from gateway.api.sampling_request import invalid, unsupported
from gateway.api.time_limit import TimeLimit
from gateway.api.tools_request import read_functions
from gateway.api.typed_input import decoded
from gateway.services import Services


class TokenizeBody(Struct, frozen=True):
    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, object]] | None = None


class DetokenizeBody(Struct, frozen=True):
    model: str
    tokens: list[int]


_decode_tokenize = msgspec.json.Decoder(TokenizeBody).decode
_decode_detokenize = msgspec.json.Decoder(DetokenizeBody).decode


async def tokenize(services: Services, exchange: Exchange) -> None:
    with enter(services, exchange):
        body = decoded(exchange.body, _decode_tokenize, needs="model and prompt, or messages")
        exchange.body = b""
        _check(body)
        served = find_served(services, exchange, body.model)
        text = served.text
        if body.messages is None:
            assert body.prompt is not None
            field = "prompt"
            work = text.raw_prompt(body.prompt, with_bos=body.add_special_tokens is not False)
        else:
            field = "messages"
            tools = read_functions(body.tools or [])
            exchange.common_headers += tools.headers()
            work = text.chat_prompt(
                read_messages(body.messages),
                tools.functions,
                add_generation_prompt=body.add_generation_prompt is not False,
            )
        ids = (await tokenised(services, served, field, work)).tolist()
        shown = None
        if body.return_token_strs:
            shown = await off_loop(len(ids), partial(text.token_texts, ids))
    await _reply(
        services,
        exchange,
        {
            "count": len(ids),
            "max_model_len": window_of(served.info),
            "tokens": ids,
            "token_strs": shown,
        },
    )


async def detokenize(services: Services, exchange: Exchange) -> None:
    with enter(services, exchange):
        body = decoded(exchange.body, _decode_detokenize, needs="model and tokens")
        exchange.body = b""
        text = find_served(services, exchange, body.model).text
        if len(body.tokens) > text.context_tokens:
            raise invalid(
                "tokens",
                f"{len(body.tokens)} ids",
                f"at most {text.context_tokens}, the model's context",
                "send them in parts",
            )
        for index, token in enumerate(body.tokens):
            if not 0 <= token < text.vocab_size:
                raise invalid(
                    f"tokens[{index}]",
                    str(token),
                    f"0 to {text.vocab_size - 1}",
                    "send ids of this model's vocabulary",
                )
        shown = await off_loop(len(body.tokens), partial(text.text_of, body.tokens))
    await _reply(services, exchange, {"prompt": shown})


def _check(body: TokenizeBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        found = "neither" if body.prompt is None else "both"
        raise invalid("prompt", found, "prompt or messages", "send one of the two")
    if body.continue_final_message:
        raise unsupported("continue_final_message", "true", "false", "leave it out")
    if body.messages is not None and body.add_special_tokens:
        raise unsupported(
            "add_special_tokens", "true", "false with messages", "the template adds what it needs"
        )
    if body.messages is None and body.tools:
        raise invalid("tools", "tools beside a prompt", "tools with messages", "leave tools out")


async def _reply(services: Services, exchange: Exchange, value: object) -> None:
    try:
        with TimeLimit(services.config.stream.send_stall_s):
            await exchange.reply_json(value)
    except TimeoutError:  # who takes nothing for so long is gone
        exchange.client_left = True
        raise ClientLeft from None
