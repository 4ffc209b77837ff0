"""POST /v1/completions: raw prompts, texts or token ids, without a chat template.

Text is untrusted as in chat: what looks like a special token in it is encoded as text. Token ids
are taken as they are, so that a caller with the tokenizer may place special tokens. Each prompt is
a stream of its own on some node; the request has one row, whose tokens are the sums.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

from gateway.api.answer import answer
from gateway.api.choice import Echo
from gateway.api.completion_begin import Prompt, begin, enter, find_served, tokenised
from gateway.api.completions_request import read_completion_request
from gateway.api.exchange import Exchange
from gateway.api.off_loop import off_loop
from gateway.api.sampling_request import SamplingRequest, invalid
from gateway.api.sse import TextChunks
from gateway.nodes.views import ServedModel
from gateway.services import Services
from gateway.text.model import TextModel

# 500,000 tokens with one alternative each: 1.2 s of a thread and 0.4 GB while they become JSON.
MAX_TOLD = 1_000_000


async def completions(services: Services, exchange: Exchange) -> None:
    """Key and body were checked by the caller; raises GatewayError before the first byte."""
    with enter(services, exchange) as ticket:
        request = read_completion_request(exchange.body, services.config.limits)
        exchange.body = b""  # decoded: a long stream need not hold it
        exchange.notes.update(stream=request.stream)
        served = find_served(services, exchange, request.model)
        prompts = [
            await read_prompt(services, served, field, prompt, has_echo=request.echo)
            for field, prompt in request.prompts
        ]
        _check_told(request.sampling, prompts)
        run = await begin(
            services,
            exchange,
            ticket,
            served,
            prompts=prompts,
            sampling=request.sampling,
            retention=request.retention,
            hints=request.hints,
        )
        await answer(
            services, exchange, run, request, TextChunks, token_bytes=served.text.token_bytes
        )


async def read_prompt(
    services: Services,
    served: ServedModel,
    field: str,
    prompt: str | Sequence[int],
    *,
    has_echo: bool,
) -> Prompt:
    """Raises GatewayError for ids that the model has not, or for no ids at all."""
    text = served.text
    if isinstance(prompt, str):
        ids = await tokenised(services, served, field, text.raw_prompt(prompt))
    else:
        for token_id in (min(prompt, default=0), max(prompt, default=0)):
            if not 0 <= token_id < text.vocab_size:
                raise invalid(
                    field,
                    f"token id {token_id}",
                    f"ids from 0 to {text.vocab_size - 1}",
                    "tokenise with this model's tokenizer",
                )
        ids = array("I", prompt)
    if not ids:
        raise invalid(field, "no token", "at least one token", "send some text")
    if not has_echo:
        return Prompt(ids, field)
    return Prompt(ids, field, await off_loop(len(ids), lambda: _echo(text, prompt, ids)))


def _check_told(sampling: SamplingRequest, prompts: Sequence[Prompt]) -> None:
    """What is told of prompts is held until it is sent, so it is bounded."""
    if sampling.prompt_logprobs is None:
        return
    num_tokens = sum([len(prompt.ids) for prompt in prompts])
    told = num_tokens * sampling.n * (1 + sampling.prompt_logprobs)
    if told > MAX_TOLD:
        raise invalid(
            "logprobs",
            f"{told} log probabilities of {num_tokens} prompt tokens",
            f"at most {MAX_TOLD} in one answer",
            "ask for fewer beside each token, or send fewer prompts at a time",
        )


def _echo(text: TextModel, prompt: str | Sequence[int], ids: array[int]) -> Echo:
    """A text is repeated as it was sent; a token in front that is ours shows no text."""
    pieces = text.pieces(ids)
    whole = "".join(pieces)
    shown = prompt if isinstance(prompt, str) else whole
    ours = len(whole) - len(shown) if whole.endswith(shown) else 0
    begins = accumulate([len(piece) for piece in pieces[:-1]], initial=-ours)
    return Echo(shown, ids, [min(max(begin, 0), len(shown)) for begin in begins])
