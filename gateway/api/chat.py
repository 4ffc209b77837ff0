"""POST /v1/chat/completions: from a decoded body to the last byte, settled exactly once.

enter → text → limits → reserve → dispatch ─┬─ node computes
                                            └─ row committed → first byte → … → settle
"""

from __future__ import annotations

from gateway.api.answer import answer
from gateway.api.chat_request import read_chat_request
from gateway.api.completion_begin import Prompt, begin, enter, find_served, tokenised
from gateway.api.exchange import Exchange
from gateway.api.sse import ChatChunks
from gateway.services import Services
from gateway.upstreams.relay import claims, relay


async def chat(services: Services, exchange: Exchange) -> None:
    """Key and body were checked by the caller; raises GatewayError before the first byte."""
    if claims(services, exchange.body):
        await relay(services, exchange, "chat")
        return
    with enter(services, exchange) as ticket:
        request = read_chat_request(exchange.body, services.config.limits)
        exchange.body = b""  # decoded: a long stream need not hold it
        exchange.notes.update(stream=request.stream)
        exchange.common_headers += request.tools.headers()
        served = find_served(services, exchange, request.model)
        rendered = served.text.chat_prompt(request.messages, request.tools.functions)
        ids = await tokenised(services, served, "messages", rendered)
        run = await begin(
            services,
            exchange,
            ticket,
            served,
            prompts=[Prompt(ids, "messages")],
            sampling=request.sampling,
            retention=request.retention,
            hints=request.hints,
            tools=request.tools,
        )
        await answer(
            services, exchange, run, request, ChatChunks, token_bytes=served.text.token_bytes
        )
