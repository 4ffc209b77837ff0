"""Retention hints reach the node, in seconds; what is clipped is told."""

from __future__ import annotations

import pytest

from gateway.config import GatewayConfig, LimitsConfig, ServerConfig

DAY_S = 86_400


@pytest.mark.parametrize(
    ("fields", "seconds", "changed"),
    [
        ({}, None, []),
        ({"retention_s": None, "prompt_cache_options": None}, None, []),
        ({"retention_s": 0}, None, []),
        ({"retention_s": 90.5}, 90.5, []),
        ({"retention_s": 200_000}, DAY_S, ["retention_s 200000 -> 86400"]),
        ({"prompt_cache_retention": "in_memory"}, None, []),
        ({"prompt_cache_retention": "24h"}, DAY_S, []),
        ({"prompt_cache_options": {"mode": "implicit"}}, None, []),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800, []),
        ({"prompt_cache_options": {"ttl": "3d"}}, DAY_S, ["retention_s 259200 -> 86400"]),
        ({"prompt_cache_options": {"ttl": "1h"}, "retention_s": 60}, 3600, []),
        ({"prompt_cache_options": {"ttl": "0s"}, "prompt_cache_retention": "24h"}, DAY_S, []),
    ],
)
def test_a_hint_becomes_seconds_of_the_submit(gateway, ask, fields, seconds, changed) -> None:
    with gateway.client() as client:
        chat = client.post("/v1/chat/completions", json=ask("hello", **fields))
        raw = client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 1, **fields}
        )
    assert (chat.status_code, raw.status_code) == (200, 200), chat.text + raw.text
    assert [one.submit.retention_s for one in gateway.node.served] == [seconds, seconds]
    for reply in (chat, raw):
        assert reply.headers.get_list("x-kagari-changed") == changed


def test_without_a_limit_above_zero_no_hint_is_obeyed(start, ask, tmp_path) -> None:
    config = GatewayConfig(
        server=ServerConfig(port=0, link_port=0, admin_port=0), limits=LimitsConfig(retention_s=0)
    )
    with start(tmp_path, config) as gateway, gateway.client() as client:
        reply = client.post("/v1/chat/completions", json=ask("hello", retention_s=60))
        assert reply.headers["x-kagari-changed"] == "retention_s 60 -> 0"
        assert gateway.node.served[0].submit.retention_s is None
