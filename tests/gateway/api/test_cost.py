"""usage.cost on request: the ledger's charge to the last digit, streamed or whole."""

from __future__ import annotations

import json
import sqlite3
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest

from gateway.ledger.files import LEDGER_NAME

PADDING = "the same words again and again " * 4


def body_of(say: str, **fields: Any) -> dict[str, Any]:
    content = json.dumps({"pad": PADDING, "say": say})
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


def usage_of(reply: httpx.Response, stream: bool) -> dict[str, Any]:
    """With numbers as they were written."""
    if not stream:
        return json.loads(reply.text, parse_float=Decimal)["usage"]
    last = [line for line in reply.text.split("\n\n") if line.startswith("data: {")][-1]
    event = json.loads(last[6:], parse_float=Decimal)
    assert event["choices"] == []
    return event["usage"]


def settled(gateway: Any) -> dict[str, tuple[int, int]]:
    """(charge, saved) by request id."""
    gateway.wait_idle()
    path = gateway.services.home.folder / LEDGER_NAME
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return {
            request_id: (charge, saved)
            for request_id, charge, saved in connection.execute(
                "SELECT request_id, charge_nano_usd, saved_nano_usd FROM requests"
            )
        }
    finally:
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_cost_is_the_ledgers_charge(gateway, stream) -> None:
    discounts = []
    for say in ("a", "bc", "def"):
        body = body_of(say, stream=stream, usage={"include": True})
        with gateway.client() as client:
            reply = client.post("/v1/chat/completions", json=body)
        usage = usage_of(reply, stream)
        charge, saved = settled(gateway)[reply.headers["x-request-id"]]
        assert usage["cost"] * 10**9 == charge > 0
        assert usage["cost_details"]["charge_nano_usd"] == charge
        assert usage["cost_details"]["cache_discount"] * 10**9 == saved
        discounts.append(saved)
    assert max(discounts) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_cost_of_a_text_completion_is_the_ledgers_charge_over_all_choices(gateway, stream) -> None:
    body = {"model": "tiny", "prompt": ["one prompt", "another"], "n": 2, "stream": stream}
    with gateway.client() as client:
        reply = client.post("/v1/completions", json={**body, "usage": {"include": True}})
        plain = client.post("/v1/completions", json=body)
    usage = usage_of(reply, stream)
    charge, _ = settled(gateway)[reply.headers["x-request-id"]]
    assert usage["cost"] * 10**9 == charge > 0
    assert '"cost"' not in plain.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [None, {}, {"include": False}, {"include": None}])
def test_who_does_not_ask_is_not_told(gateway, stream, usage) -> None:
    body = body_of("a", stream=stream, usage=usage)
    with gateway.client() as client:
        reply = client.post("/v1/chat/completions", json=body)
    assert '"cost"' not in reply.text
    assert ('"usage"' in reply.text) == (not stream)


def test_official_sdk_reads_it_beside_what_it_knows(gateway, ask) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="test-key-0123456789abcdef") as client:
        reply = client.chat.completions.create(
            **ask({"say": "abc"}), extra_body={"usage": {"include": True}}
        )
        chunks = list(
            client.chat.completions.create(
                **ask({"say": "abc"}), stream=True, extra_body={"usage": {"include": True}}
            )
        )
    assert reply.usage.cost > 0
    assert chunks[-1].usage.completion_tokens == 3
    assert chunks[-1].usage.cost > 0


def test_wish_of_a_wrong_type_is_refused_by_its_field(gateway) -> None:
    with gateway.client() as client:
        reply = client.post("/v1/chat/completions", json=body_of("a", usage={"include": "yes"}))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "usage.include")
