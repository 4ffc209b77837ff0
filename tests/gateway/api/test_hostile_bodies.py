"""Odd fields, odd headers, odd chunks, any bytes: never a 5xx, never a hang, never a leak."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import strategies as st

from gateway.errors import KINDS
from tests.gateway.api import hostile_bodies as bodies
from tests.gateway.api.conftest import KEY, FuzzCount, run_cases
from tests.gateway.api.wire_client import Answer, Cuts, WireClient, cut, strict_json

# The gateway's own thread draws from the global `random` (WebSocket pings), which hypothesis takes
# for a strategy that does.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

CUTS = st.builds(Cuts, st.none() | bodies.SIZES, st.just(()) | bodies.SIZES)
ROUTES = {
    "chat": ("/v1/chat/completions", bodies.CHAT),
    "completions": ("/v1/completions", bodies.COMPLETION),
    "tokenize": ("/tokenize", bodies.TOKENIZE),
    "detokenize": ("/v1/detokenize", bodies.DETOKENIZE),
}


def requests_of(name: str) -> st.SearchStrategy[tuple[Any, ...]]:
    path, body = ROUTES[name]
    return st.tuples(st.just(path), body.map(bodies.encoded), bodies.HEADERS, CUTS)


ANYTHING = st.tuples(
    st.sampled_from([path for path, _ in ROUTES.values()]),
    bodies.ANY_JSON.map(bodies.encoded) | bodies.ANY_BYTES,
    bodies.HEADERS,
    CUTS,
)
ADMIN = "/admin/v1"
SEGMENTS = bodies.TEXTS.filter(len).map(lambda text: quote(text[:200].encode(), safe=""))
ADMIN_BODIES = {
    ("POST", "/keys"): bodies.oddly(
        st.fixed_dictionaries({"name": bodies.TEXTS}, optional={"tenant": bodies.TEXTS}),
        [("name",), ("tenant",), ("x",)],
    ),
    ("PATCH", "/keys/{}"): bodies.oddly(
        st.fixed_dictionaries({"name": bodies.TEXTS}), [("name",), ("x",)]
    ),
    ("POST", "/session-lookup"): bodies.oddly(
        st.fixed_dictionaries({"value": bodies.TEXTS, "model": st.just("tiny")}),
        [("value",), ("model",), ("tenant",), ("x",)],
    ),
    ("POST", "/routing/explain"): bodies.oddly(
        st.fixed_dictionaries({"model": st.just("tiny"), "prompt": bodies.TEXTS}),
        [("model",), ("prompt",), ("messages",), ("n",)],
    ),
    ("DELETE", "/keys/{}"): st.just({}),
    ("POST", "/nodes/{}/drain"): bodies.ANY_JSON,
}
ADMIN_CALLS = st.sampled_from(sorted(ADMIN_BODIES)).flatmap(
    lambda call: st.tuples(
        st.just(call[0]),
        SEGMENTS.map(lambda segment: ADMIN + call[1].format(segment)),
        ADMIN_BODIES[call].map(bodies.encoded)
        | bodies.ANY_JSON.map(bodies.encoded)
        | bodies.ANY_BYTES,
        CUTS,
    )
)
QUERY_NAMES = [
    *("limit", "after", "tenant", "key", "model", "status", "from", "to", "request_id"),
    *("group_by", "x"),
]
QUERY_VALUES = bodies.TEXTS.map(lambda text: quote(text[:300].encode())) | st.sampled_from(
    [
        *("0", "1", "1000", "9" * 30, "-1", "1e3", "ok", "open", "day", "day,day", "day,key"),
        *("2026-11-01", "0001-01-01", "9999-12-31", "2026-02-30", "0001-01-01T00:00:00%2B14:00"),
        *("9999-12-31T23:59:59.999999-14:00", "2026-11-01T00:00:00Z", "2026-11-01T00:00:00"),
        *("ksv_8AAAAAAAAKA", "kst/AAAAAAAAAKA", "AQ", "gA==", "_w", "%ED%A0%80", "%00", "%"),
    ]
)
QUERIES = st.tuples(
    st.sampled_from(
        [
            (False, "/v1/usage"),
            (False, "/v1/models/{}"),
            (True, ADMIN + "/keys"),
            (True, ADMIN + "/keys/{}"),
            (True, ADMIN + "/usage"),
            (True, ADMIN + "/requests"),
            (True, ADMIN + "/requests/{}"),
            (True, ADMIN + "/nodes/{}"),
            (True, ADMIN + "/sessions/{}"),
            (True, ADMIN + "/{}"),
        ]
    ),
    SEGMENTS,
    st.lists(st.tuples(st.sampled_from(QUERY_NAMES), QUERY_VALUES), max_size=3),
    st.sampled_from(["GET", "GET", "GET", "HEAD", "PUT", "X-Y"]),
)
# A request that was well-formed, with one place overwritten.
BROKEN = st.tuples(
    st.sampled_from(["chat", "completions", "tokenize"]),
    st.booleans(),  # whether its body is chunked
    st.integers(0, 400),
    st.integers(0, 12),
    st.binary(max_size=8)
    | st.sampled_from([b"\r\n", b"\r\n\r\n", b": ", b"\0", b"Content-Length: 5\r\n", b"0\r\n\r\n"]),
    bodies.SIZES,
)


@dataclass(frozen=True, repr=False)  # hypothesis writes out what it passes
class Askers:
    gateway: Any
    client: WireClient
    operator: WireClient
    http2: httpx.Client


@pytest.fixture(scope="module")
def shared_gateway(shared_caller_gateway: Any) -> Any:
    return shared_caller_gateway


@pytest.fixture
def askers(gateway: Any) -> Iterator[Askers]:
    admin_port = int(gateway.addresses.admin_url.rsplit(":", 1)[1])
    with (
        closing(WireClient(gateway.port, KEY)) as client,
        closing(WireClient(admin_port, gateway.services.home.admin_token)) as operator,
        gateway.client(http2=True) as http2,
    ):
        yield Askers(gateway, client, operator, http2)
    gateway.wait_settled()


def is_told(answer: Answer, *, has_body: bool = True) -> None:
    """A success with a whole body, or a refusal of the table in its form."""
    assert answer.status < 500, (answer.status, answer.body)
    assert sum([len(name) + len(value) for name, value in answer.headers.items()]) < 2048
    if not has_body:
        return
    if answer.status >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert KINDS[error["code"]].status == answer.status
    elif answer.is_stream:
        *events, last = answer.events()
        assert last == b"[DONE]"
        assert not [event for event in events if "error" in strict_json(event)]
    elif answer.headers["content-type"] == "application/json":
        assert "error" not in answer.json()


def ask_client(askers: Askers, request: tuple[Any, ...]) -> None:
    path, data, headers, cuts = request
    askers.gateway.node.served.clear()  # all prompts of thousands of cases are too much to keep
    is_told(askers.client.ask(path, data, headers=headers, cuts=cuts))


def ask_over_http2(askers: Askers, request: tuple[Any, ...]) -> None:
    path, data, headers, cuts = request
    askers.gateway.node.served.clear()
    content = data if cuts.chunks is None else cut(data, cuts.chunks)
    headers = {name: value for name, value in headers.items() if name != "te"}  # not sent so
    reply = askers.http2.post(path, content=content, headers=headers)
    assert reply.http_version == "HTTP/2"
    is_told(Answer(reply.status_code, dict(reply.headers), reply.content))


def ask_operator(askers: Askers, request: tuple[Any, ...]) -> None:
    method, path, data, cuts = request
    answer = askers.operator.ask(path, data, method=method, cuts=cuts)
    is_told(answer)
    if answer.status == 201:  # or the book of keys would grow without end
        path = f"{ADMIN}/keys/{answer.json()['key_id']}"
        is_told(askers.operator.ask(path, method="DELETE"))


def ask_query(askers: Askers, request: tuple[Any, ...]) -> None:
    (is_operator, path), segment, pairs, method = request
    query = "&".join([f"{name}={value}" for name, value in pairs])
    asker = askers.operator if is_operator else askers.client
    answer = asker.ask(f"{path.format(segment)}?{query}", method=method)
    is_told(answer, has_body=method != "HEAD")


def send_broken(askers: Askers, request: tuple[Any, ...]) -> None:
    """Whatever comes back: it comes soon, it is no 5xx, and then the connection ends."""
    name, is_chunked, place, length, put_in, sizes = request
    body = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"prompt":"x"}'
    data = askers.gateway.raw(body, path=ROUTES[name][0], extra="Connection: close\r\n")
    if is_chunked:
        length_line = b"Content-Length: %d\r\n" % len(body)
        data = data.replace(length_line, b"Transfer-Encoding: chunked\r\n").removesuffix(body)
        data += b"".join([b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut(body, (9, 30))])
        data += b"0\r\n\r\n"
    data = data[:place] + put_in + data[place + length :]
    answer = b""
    with askers.gateway.connect() as opened:
        with suppress(OSError):  # refused before its end
            for piece in cut(data, sizes):
                opened.sendall(piece)
            opened.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := opened.recv(1 << 16):
                answer += piece
    assert answer[9:12] < b"500", answer


@dataclass(frozen=True)
class Fuzz:
    requests: st.SearchStrategy[tuple[Any, ...]]
    ask: Callable[[Askers, tuple[Any, ...]], None]
    few: int
    many: int


FUZZ = {
    "chat": Fuzz(requests_of("chat"), ask_client, 80, 10_000),
    "completions": Fuzz(requests_of("completions"), ask_client, 60, 7_000),
    "tokenize": Fuzz(requests_of("tokenize"), ask_client, 50, 3_000),
    "detokenize": Fuzz(requests_of("detokenize"), ask_client, 40, 1_000),
    "HTTP/2": Fuzz(requests_of("chat") | requests_of("completions"), ask_over_http2, 60, 4_000),
    "anything": Fuzz(ANYTHING, ask_client, 60, 4_000),
    "operator": Fuzz(ADMIN_CALLS, ask_operator, 50, 3_000),
    "queries": Fuzz(QUERIES, ask_query, 60, 4_000),
    "broken": Fuzz(BROKEN, send_broken, 60, 4_000),
}


def run(fuzz: Fuzz, askers: Askers, *, count: int) -> int:
    return run_cases(fuzz.requests, partial(fuzz.ask, askers), count=count)


@pytest.mark.parametrize("name", FUZZ)
def test_what_is_odd_is_answered(askers: Askers, name: str) -> None:
    run(FUZZ[name], askers, count=FUZZ[name].few)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZ)
def test_what_is_odd_is_answered_at_length(
    askers: Askers, name: str, fuzz_count: FuzzCount
) -> None:
    checked = run(FUZZ[name], askers, count=FUZZ[name].many)
    assert checked >= FUZZ[name].many
    fuzz_count.add(f"odd requests: {name}", checked)
