"""A row says which tiers its cached tokens came from, however the request ended."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.requests import RequestLine, requests

SCRIPT = {"say": "one two three four", "tiers": {"host": 32, "disk": 16}, "pad": "z" * 99}


def row_of(gateway: Any, request_id: str) -> RequestLine:
    gateway.wait_settled()
    ledger = gateway.services.home.folder / LEDGER_NAME
    return next(line for line in requests(ledger) if line.request_id == request_id)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},  # the prompt counts once
        {"stream": True},
        {"stop": "three"},  # the gateway ends it: the engine's own usage comes too late
    ],
)
def test_a_hit_is_told_by_tier(gateway, ask, fields) -> None:
    with gateway.client() as client:
        cold = client.post("/v1/chat/completions", json=ask(SCRIPT, **fields))
        keep(gateway, client, ask, SCRIPT)
        warm = client.post("/v1/chat/completions", json=ask(SCRIPT, **fields))
    assert row_of(gateway, cold.headers["x-request-id"]).tiers == {}
    line = row_of(gateway, warm.headers["x-request-id"])
    assert line.cached_tokens > 48
    assert line.tiers == {"device": line.cached_tokens - 48, "host": 32, "disk": 16}
    if "stream" not in fields:
        assert warm.headers["x-kagari-cached-tokens"] == str(line.cached_tokens)


def test_a_client_that_leaves_has_its_tiers_too(gateway, ask) -> None:
    script = {**SCRIPT, "times": 50, "delay_s": 0.05}
    with gateway.client() as client:
        keep(gateway, client, ask, script)
        body = ask(script, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(line for line in answer.iter_lines() if "content" in line)
            request_id = answer.headers["x-request-id"]
    line = row_of(gateway, request_id)
    assert line.status == "client_left"
    assert (line.tiers["host"], line.tiers["disk"]) == (32, 16)
    assert sum(line.tiers.values()) == line.cached_tokens


def keep(gateway: Any, client: Any, ask: Any, script: dict[str, Any]) -> None:
    """The node has this script's prompt: one that a stop string ends remembers nothing itself."""
    body = {"model": "tiny", "messages": ask(script)["messages"]}
    ids = tuple(client.post("/tokenize", json=body).json()["tokens"])
    gateway.node.resident |= {ids[:length] for length in range(16, len(ids), 16)}
