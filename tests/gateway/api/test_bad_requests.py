"""Every kind of bad input, with the status, the code and the field that it gets."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import msgspec
import pytest

from gateway.config import LimitsConfig
from tests.gateway.api.conftest import QUICK

GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def post(gateway: Any, body: bytes | dict[str, Any], **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with gateway.client() as client:
        return client.post(
            "/v1/chat/completions",
            content=content,
            headers={"content-type": "application/json", **headers},
        )


def error_of(reply: Any) -> dict[str, Any]:
    """The error object; its parts and OpenAI's four members must be there. Not all have a field."""
    error: dict[str, Any] = reply.json()["error"]
    assert {"message", "type", "param", "code", "number"} <= set(error)
    assert isinstance(error["number"], int)
    assert error["found"]
    assert error["allowed"]
    assert error["remedy"]
    assert error["docs"] == f"docs/errors.md#{error['code']}"
    assert error["request_id"] == reply.headers["x-request-id"]
    return error


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "invalid_request", "messages"),
    ({"messages": None}, "invalid_request", "messages"),
    ({"messages": "hello"}, "invalid_request", "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_request", "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "invalid_request", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "invalid_request", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "invalid_request",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "unsupported",
        "messages[0].content[0].type",
    ),
    ({"model": ""}, "invalid_request", "model"),
    ({"model": 7}, "invalid_request", "model"),
    ({"stream": "yes"}, "invalid_request", "stream"),
    ({"max_tokens": "many"}, "invalid_request", "max_tokens"),
    ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_request", "max_tokens"),
    ({"max_completion_tokens": -1}, "invalid_request", "max_completion_tokens"),
    ({"temperature": "NaN"}, "invalid_request", "temperature"),
    ({"temperature": -0.1}, "invalid_request", "temperature"),
    ({"temperature": 2.1}, "invalid_request", "temperature"),
    ({"top_p": 0}, "invalid_request", "top_p"),
    ({"top_p": 1.01}, "invalid_request", "top_p"),
    ({"top_k": -2}, "invalid_request", "top_k"),
    ({"min_p": 2}, "invalid_request", "min_p"),
    ({"seed": "x"}, "invalid_request", "seed"),
    ({"stop": ["a"] * 17}, "invalid_request", "stop"),
    ({"stop": ["a"] * 10_000}, "invalid_request", "stop"),
    ({"stop": ["a" * 257]}, "invalid_request", "stop"),
    ({"stop": [""]}, "invalid_request", "stop"),
    ({"stop": 5}, "invalid_request", "stop"),
    ({"n": 17}, "invalid_request", "n"),
    ({"n": 0}, "invalid_request", "n"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported", "tools"),
    ({"functions": [{"name": "f"}]}, "unsupported", "functions"),
    ({"response_format": {"type": "json_object"}}, "unsupported", "response_format.type"),
    ({"response_format": {"type": "xml"}}, "invalid_request", "response_format.type"),
    ({"logprobs": 3}, "invalid_request", "logprobs"),
    ({"top_logprobs": 3}, "invalid_request", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
    ({"presence_penalty": -2.1}, "invalid_request", "presence_penalty"),
    ({"frequency_penalty": 9}, "invalid_request", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_request", "repetition_penalty"),
    ({"repetition_penalty": 1e-5}, "invalid_request", "repetition_penalty"),
    ({"repetition_penalty": 10_001}, "invalid_request", "repetition_penalty"),
    ({"min_tokens": -1}, "invalid_request", "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "invalid_request", "min_tokens"),
    ({"ignore_eos": 1}, "invalid_request", "ignore_eos"),
    ({"logit_bias": {"five": 1}}, "invalid_request", "logit_bias"),
    ({"logit_bias": {"07": 1}}, "invalid_request", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_request", "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "invalid_request", "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "invalid_request", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_request", "logit_bias.5"),
    ({"logit_bias": {"5": "x"}}, "invalid_request", "logit_bias[...]"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "invalid_request", "logit_bias"),
    ({"stream_options": 1}, "invalid_request", "stream_options"),
    ({"retention_s": -1}, "invalid_request", "retention_s"),
    ({"retention_s": "1h"}, "invalid_request", "retention_s"),
    ({"prompt_cache_options": {"ttl": "1 h"}}, "invalid_request", "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"ttl": "-5m"}}, "invalid_request", "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"ttl": 30}}, "invalid_request", "prompt_cache_options.ttl"),
    ({"prompt_cache_options": "30m"}, "invalid_request", "prompt_cache_options"),
    ({"prompt_cache_retention": "forever"}, "invalid_request", "prompt_cache_retention"),
    ({"prompt_cache_retention": 24}, "invalid_request", "prompt_cache_retention"),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD_FIELDS)
def test_impossible_field_is_refused_by_name(gateway, fields, code, param) -> None:
    reply = post(gateway, {**GOOD, **fields})
    assert reply.status_code == 400, reply.text
    error = error_of(reply)
    assert (error["code"], error["param"]) == (code, param)
    assert param in error["message"]
    assert reply.headers["x-should-retry"] == "false"
    assert not gateway.node.served


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {
            "presence_penalty": -2,
            "frequency_penalty": 2,
            "repetition_penalty": 1.3,
            "min_tokens": 1,
        },
        {"logit_bias": {"5": 100, "0": -100}, "ignore_eos": True, "top_logprobs": 0},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False},
        {"response_format": {"type": "text"}, "n": 1, "stop": None, "top_k": -1},
        {"stop": ["a"] * 16},
        {"model": "tiny", "reasoning_effort": "high", "unheard_of": [1, {"a": None}]},
        {"seed": -1},
        {"max_tokens": None, "temperature": None, "stream": None},
    ],
)
def test_harmless_and_unknown_fields_are_accepted(gateway, fields) -> None:
    assert post(gateway, {**GOOD, **fields}).status_code == 200


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_field_is_named(gateway, missing) -> None:
    reply = post(gateway, {name: value for name, value in GOOD.items() if name != missing})
    assert (reply.status_code, error_of(reply)["param"]) == (400, missing)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"model": "tiny", "messages": [',
        b"not json",
        b'{"model": "tiny", "temperature": NaN, "messages": []}',
        b'{"model": "tiny", "temperature": 1e999, "messages": []}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b"[" * 100_000,
        b'{"model": "tiny", "messages": [], "seed": 1' + b"0" * 400 + b"}",
        b'"just a string"',
        b"null",
    ],
)
def test_malformed_json_is_a_400(gateway, body) -> None:
    reply = post(gateway, body)
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["code"] in ("invalid_json", "invalid_request")


def test_lone_surrogate_is_invalid_json(gateway) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\udc00b"}]}'
    assert error_of(post(gateway, body))["code"] == "invalid_json"


def test_empty_body_is_missing_body(gateway) -> None:
    error = error_of(post(gateway, b""))
    assert (error["code"], error["number"]) == ("missing_body", 3003)


def test_unknown_model_names_the_nearest(gateway) -> None:
    reply = post(gateway, {**GOOD, "model": "tinny"})
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["number"]) == (404, "model_not_found", 5007)
    assert '"tiny"' in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow_is_a_400_in_words_that_harnesses_know(gateway, stream) -> None:
    long = "x " * 40_000
    body = {**GOOD, "messages": [{"role": "user", "content": long}], "stream": stream}
    reply = post(gateway, body)
    error = error_of(reply)
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert reply.headers["content-type"] == "application/json"
    assert "maximum context length is 65536 tokens" in error["message"]
    assert "requested 80" in error["message"]  # 80,000 tokens and the template's
    assert "prompt is too long: " in error["message"]
    assert "> 65535 maximum" in error["message"]
    assert not gateway.node.served


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer wrong", "Basic abc"])
def test_wrong_key_is_a_401_and_is_not_repeated(gateway, authorization) -> None:
    with gateway.client() as client:
        del client.headers["authorization"]
        headers = {} if authorization is None else {"authorization": authorization}
        reply = client.post("/v1/chat/completions", json=GOOD, headers=headers)
    assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "wrong" not in reply.text


def test_x_api_key_is_a_key_too(gateway) -> None:
    with gateway.client() as client:
        del client.headers["authorization"]
        reply = client.get("/v1/models", headers={"x-api-key": "test-key-0123456789abcdef"})
    assert reply.status_code == 200


def test_unknown_route_names_near_ones_and_wrong_method_says_which(gateway) -> None:
    with gateway.client() as client:
        lost = client.post("/v1/chat/completion", json=GOOD)
        wrong = client.get("/v1/chat/completions")
    assert (lost.status_code, error_of(lost)["code"]) == (404, "not_found")
    assert "/v1/chat/completions" in error_of(lost)["message"]
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert error_of(wrong)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "value",
    [
        b"a\r\n\tb",  # the old way to fold a header
        b"a\rx-evil: 1",
        b"a\nx-evil: 1",
        b"a%0d%0ax-evil: 1",
        "é\u0160".encode(),
        b"\xe9\xff",
        b"a\x00b",
        b"\x1b[31m",
        b"a" * 257,
        b'{"$ne": null}',
        b"../../etc/passwd",
    ],
)
def test_session_header_splits_no_answer_and_is_never_sent_back(gateway, value) -> None:
    body = json.dumps(GOOD).encode()
    head, _, _ = gateway.raw(body, extra="Connection: close\r\n").partition(b"\r\n\r\n")
    with gateway.connect() as sock:
        sock.sendall(head + b"\r\nX-Session-Affinity: " + value + b"\r\n\r\n" + body)
        reply = read_all(sock)
    assert reply.count(b"HTTP/1.1 ") == 1
    names = {line.split(b":")[0].lower() for line in reply.split(b"\r\n\r\n")[0].split(b"\r\n")}
    assert b"x-evil" not in names
    assert reply.split(b" ")[1] in (b"200", b"400")
    if len(value) > 3:
        assert value not in reply
        assert value.decode("latin-1") not in gateway.log.getvalue()


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, identity"])
def test_compressed_body_is_refused_clearly(gateway, encoding) -> None:
    reply = post(gateway, b"\x1f\x8b", **{"content-encoding": encoding})
    assert (reply.status_code, error_of(reply)["code"]) == (415, "unsupported_encoding")


def test_body_of_100_mb_is_refused_before_it_is_read(gateway) -> None:
    started = time.monotonic()
    with gateway.connect() as sock:
        sock.sendall(
            gateway.raw(b"", extra="").replace(b"Content-Length: 0", b"Content-Length: 100000000")
        )
        reply = read_all(sock)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in reply
    assert b'"number":3006' in reply
    assert time.monotonic() - started < 8


def test_body_of_100_mb_that_is_being_sent_is_cut_early(gateway) -> None:
    """The sender pushes as fast as it can; it still gets the answer, after a few of its bytes."""
    sent = 0
    with gateway.connect() as sock:
        sock.sendall(gateway.raw(b"").replace(b"Content-Length: 0", b"Content-Length: 100000000"))
        piece = b"x" * 65536
        try:
            while sent < 100_000_000:
                sock.sendall(piece)
                sent += len(piece)
        except (ConnectionError, TimeoutError):
            pass_on = sent  # cut, as it should be
        else:
            pass_on = sent
        try:
            reply = read_all(sock)
        except ConnectionError:
            reply = b"HTTP/1.1 413 "
    assert pass_on < 60_000_000
    assert reply.startswith(b"HTTP/1.1 413 ")


def test_body_in_pieces_of_one_byte_is_one_body(gateway) -> None:
    body = json.dumps(GOOD).encode()
    head = gateway.raw(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with gateway.connect() as sock:
        sock.sendall(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        sock.sendall(pieces + b"0\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


def test_endless_chunked_body_is_cut_at_the_limit(gateway) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n"
        b"Authorization: Bearer test-key-0123456789abcdef\r\n\r\n"
    )
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    sent = 0
    with gateway.connect() as sock:
        sock.sendall(head)
        try:
            while sent < 200:
                sock.sendall(chunk)
                sent += 1
            raise AssertionError("200 MiB were taken")
        except (ConnectionError, TimeoutError):
            assert 20 <= sent < 60
    with gateway.client() as client:
        assert client.get("/v1/models").status_code == 200


def test_headers_of_64_kb_are_refused(gateway) -> None:
    with gateway.connect() as sock:
        sock.sendall(gateway.raw(b"{}", extra=f"X-Big: {'a' * 65536}\r\n"))
        try:
            reply = read_all(sock)
        except ConnectionError:
            return
    assert reply.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: t\r\nX-Big: " + b"a" * 20_000, 431, "headers_too_large"),
        (b"this is no HTTP\r\n\r\n", 400, "invalid_request"),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400, "invalid_request"),  # no Host
        (b"GET /livez HTTP/1.1\r\nHost: t\r\nContent-Length: x\r\n\r\n", 400, "invalid_request"),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: \x01chunked\r\n\r\n",
            415,
            "unsupported_encoding",
        ),
    ],
)
def test_what_the_server_itself_refuses_has_our_four_parts(
    gateway, request_bytes, status, code
) -> None:
    with gateway.connect() as sock:
        sock.sendall(request_bytes)
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert all(error[part] for part in ("param", "found", "allowed", "remedy", "docs"))
    assert b"x-request-id: " + error["request_id"].encode() in head
    assert b"connection: close" in head
    assert b"x-should-retry: false" in head


def test_many_headers_below_the_servers_limit_get_our_431_over_http2(gateway) -> None:
    with gateway.client(http2=True) as client:
        big = {f"x-{i}": "a" * 1000 for i in range(40)}
        reply = client.get("/v1/models", headers=big)
    assert (reply.status_code, error_of(reply)["code"]) == (431, "headers_too_large")


def test_a_byte_a_second_is_cut_with_408(tmp_path, start) -> None:
    config = msgspec.structs.replace(QUICK, limits=LimitsConfig(body_grace_s=0.8))
    with start(tmp_path, config) as gateway, gateway.connect() as sock:
        started = time.monotonic()
        sock.sendall(
            gateway.raw(b"", extra="").replace(b"Content-Length: 0", b"Content-Length: 50")
        )
        sock.settimeout(0.3)
        reply = b""
        while time.monotonic() - started < 20 and b"\r\n\r\n" not in reply:
            try:
                sock.sendall(b"{")
                reply += sock.recv(65536)
            except TimeoutError:
                continue
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - started < 10  # by the usual settings it may take longer


def test_a_head_that_never_ends_does_not_stop_others(gateway) -> None:
    with gateway.connect() as sock:
        sock.sendall(b"POST /v1/chat/comp")
        assert post(gateway, GOOD).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example/admin",
        "a/../v1/models?x=",
        "127.0.0.1@evil",
        "[::1]:9",
        "x" * 300,
        "",
        "\\\\x",
    ],
)
def test_hostile_host_changes_nothing(gateway, host) -> None:
    """CVE-2026-48710: a path must never be rebuilt from the Host header."""
    with gateway.connect() as sock:
        sock.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        refused = read_all(sock)
    with gateway.connect() as sock:
        sock.sendall(f"GET /livez HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        alive = read_all(sock)
    assert refused.split(b" ")[1] in (b"401", b"400")
    assert alive.split(b" ")[1] in (b"200", b"400")


@pytest.mark.parametrize(
    "target",
    ["http://evil/v1/models", "//evil/v1/models", "/v1/../admin/v1/nodes", "/v1/models%00", "/%2e"],
)
def test_odd_targets_find_no_route_behind_another(gateway, target) -> None:
    with gateway.connect() as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
        assert read_all(sock).split(b" ")[1] in (b"404", b"401", b"400")


def test_expect_100_continue_is_answered(gateway) -> None:
    body = json.dumps(GOOD).encode()
    with gateway.connect() as sock:
        sock.sendall(
            gateway.raw(body, extra="Expect: 100-continue\r\nConnection: close\r\n")[: -len(body)]
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(body)
        assert b" 200 " in read_all(sock)


def test_a_model_without_template_answers_chat_with_a_remedy(tmp_path, start) -> None:
    import sys

    node_module = sys.modules["scripted_node"]
    models = {"bare": node_module.make_bundle(chat_template=None)}
    with start(tmp_path, models=models) as running:
        reply = post(running, {**GOOD, "model": "bare"})
    assert (reply.status_code, error_of(reply)["code"]) == (400, "no_chat_template")
    assert error_of(reply)["remedy"]
