"""Routes over the wire: roles, probes, metrics, the admin listener, HTTP/2, draining."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import httpx
import msgspec
import pytest

from gateway.config import GatewayConfig, ServerConfig, StreamConfig
from gateway.ledger.files import LEDGER_NAME
from gateway.routes import PUBLIC_ROUTES
from policies.admission import AdmissionLimits

SAMPLE = {"{account}": "acc", "{model:rest}": "tiny"}


def path_of(path: str) -> str:
    for name, value in SAMPLE.items():
        path = path.replace(name, value)
    return path


def script(**fields: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": json.dumps(fields)}]


@pytest.mark.parametrize("route", PUBLIC_ROUTES, ids=lambda route: route.path)
def test_public_listener_guards_each_route_by_its_role(gateway, route) -> None:
    with httpx.Client(base_url=gateway.url, trust_env=False) as stranger:
        status = stranger.request(route.methods[0], path_of(route.path)).status_code
    assert status == (200 if route.role == "public" else 401)


def test_admin_lists_and_drains_nodes(gateway) -> None:
    token = gateway.services.home.admin_token
    with (
        httpx.Client(
            base_url=gateway.addresses.admin_url,
            headers={"authorization": f"Bearer {token}"},
            trust_env=False,
        ) as admin,
        gateway.client() as client,
    ):
        (node,) = admin.get("/admin/v1/nodes").json()["nodes"]
        assert (node["node_id"], node["state"], node["role"]) == ("n1", "ready", "mixed")
        (engine,) = node["engines"]
        assert (engine["info"]["model"], engine["report"]["state"]) == ("tiny", "ready")
        assert admin.post("/admin/v1/nodes/n1/drain").json() == {"node_id": "n1", "draining": True}
        assert client.get("/v1/models").json()["data"] == []
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["no_node_ready"])
        refused = client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": script(say="x")}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_node")
        assert "retry-after-ms" in refused.headers
        assert admin.post("/admin/v1/nodes/n1/undrain").status_code == 200
        assert client.get("/readyz").status_code == 200
        lost = admin.post("/admin/v1/nodes/n7/drain")
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "node_not_found")


def test_probes_and_front_door(gateway) -> None:
    with httpx.Client(base_url=gateway.url, trust_env=False) as client:
        assert client.get("/livez").text == "ok\n"
        assert client.get("/startupz").status_code == 200
        assert client.get("/readyz").json() == {"ready": True, "reasons": []}
        head = client.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert "kagari" in client.get("/").text
        assert "server" not in client.get("/").headers  # versions are nobody's business


def test_metrics_count_what_happened(gateway) -> None:
    body = {"model": "tiny", "messages": script(say="12345")}
    with gateway.client() as client:
        client.post("/v1/chat/completions", json=body, headers={"x-session-affinity": "a" * 300})
    text = httpx.get(gateway.addresses.admin_url + "/metrics", trust_env=False).text
    for line in (
        'kagari_completions_total{model="tiny",outcome="ok"}',
        'kagari_affinity_ignored_total{source="x-session-affinity"}',
        'kagari_completion_tokens_total{model="tiny"}',
        'kagari_ttft_seconds_bucket{le="600.0",model="tiny"}',
        'kagari_nodes{state="ready"} 1.0',
    ):
        assert line in text


def test_one_log_line_a_request_without_secrets_or_content(gateway) -> None:
    with gateway.client() as client:
        client.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": script(say="a-secret-answer")},
            headers={"x-client-request-id": "id <script> " + "y" * 100},
        )
    gateway.wait_idle()
    lines = [line for line in gateway.log_lines() if line["event"] == "request"]
    line = lines[-1]
    assert line["client_request_id"] == "idscript" + "y" * 52
    assert {"request_id", "tenant", "key_id", "model", "node", "status", "ttft_s"} <= set(line)
    assert (line["cached_tokens"], line["completion_tokens"]) == (0, 15)
    assert (line["path"], line["affinity"], line["finish"]) == ("mixed", "none", "stop")
    whole = gateway.log.getvalue()
    assert "a-secret-answer" not in whole
    assert "test-key-0123456789abcdef" not in whole


def test_what_a_client_calls_a_model_is_not_logged(gateway) -> None:
    """It may be a key that went into the wrong field, or a megabyte."""
    with gateway.client() as client:
        for name in ("my-own-secret-of-16", "m" * 1_000_000):
            body = {"model": name, "messages": script(say="x")}
            assert client.post("/v1/chat/completions", json=body).status_code == 404
    assert "my-own-secret-of-16" not in gateway.log.getvalue()
    assert max(map(len, gateway.log.getvalue().splitlines())) < 2000


def test_hundred_streams_on_one_http2_connection(gateway) -> None:
    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        async with httpx.AsyncClient(
            base_url=gateway.url,
            http1=False,
            http2=True,
            limits=limits,
            timeout=30,
            trust_env=False,
            headers={"authorization": "Bearer test-key-0123456789abcdef"},
        ) as client:

            async def one(number: int) -> str:
                reply = await client.post(
                    "/v1/chat/completions",
                    json={
                        "model": "tiny",
                        "stream": True,
                        "messages": script(say=f"answer {number}", delay_s=0.02),
                    },
                )
                assert (reply.status_code, reply.http_version) == (200, "HTTP/2")
                return reply.text

            return await asyncio.gather(*(one(number) for number in range(100)))

    texts = asyncio.run(main())
    for number, text in enumerate(texts):
        chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        assert said == f"answer {number}"
        assert text.endswith("data: [DONE]\n\n")


class Http2:
    """A bare HTTP/2 client, for what httpx hides: resets, and data after the answer."""

    def __init__(self, gateway: Any) -> None:
        self.sock = gateway.connect()
        self.seen: list[h2.events.Event] = []  # and not waited for
        self.connection = h2.connection.H2Connection(
            config=h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self.connection.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.sock.sendall(self.connection.data_to_send())

    def ask(self, path: str, body: bytes, *, end: bool = True) -> int:
        stream_id = self.connection.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":path", path),
            (":scheme", "http"),
            (":authority", "t"),
            ("authorization", "Bearer test-key-0123456789abcdef"),
            ("content-type", "application/json"),
        ]
        self.connection.send_headers(stream_id, headers)
        self.connection.send_data(stream_id, body, end_stream=end)
        self.flush()
        return stream_id

    def events(self) -> list[h2.events.Event]:
        data = self.sock.recv(65536)
        assert data, "the server closed the connection"
        found = self.connection.receive_data(data)
        for event in found:
            if isinstance(event, h2.events.DataReceived):
                self.connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
        self.flush()
        return found

    def wait(self, kind: type[h2.events.Event], stream_id: int) -> Any:
        """Other events may come before it, and in one piece with it."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for event in self.seen:
                if isinstance(event, kind) and event.stream_id == stream_id:
                    self.seen.remove(event)
                    return event
            self.seen += self.events()
        raise AssertionError(f"no {kind.__name__} for stream {stream_id}")


def chat_bytes(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "stream": True, "messages": script(**fields)}).encode()


def test_rst_stream_aborts_only_its_stream(gateway) -> None:
    client = Http2(gateway)
    with client.sock:
        first = client.ask("/v1/chat/completions", chat_bytes(say="x" * 1000, delay_s=0.01))
        client.wait(h2.events.DataReceived, first)
        second = client.ask("/v1/chat/completions", chat_bytes(say="y" * 30, delay_s=0.01))
        client.wait(h2.events.ResponseReceived, second)
        client.connection.reset_stream(first)
        client.flush()
        deadline = time.monotonic() + 20
        while not gateway.node.served[0].aborted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.wait(h2.events.StreamEnded, second)
        assert not gateway.node.served[1].aborted


def test_early_refusal_on_http2_does_not_end_other_streams(gateway) -> None:
    """Hypercorn alone ends the connection on data for a stream that was answered already."""
    client = Http2(gateway)
    with client.sock:
        running = client.ask("/v1/chat/completions", chat_bytes(say="z" * 250, delay_s=0.01))
        client.wait(h2.events.ResponseReceived, running)
        refused = client.ask("/v1/nowhere", b"a", end=False)
        status = dict(client.wait(h2.events.ResponseReceived, refused).headers)[":status"]
        assert status == "404"
        client.wait(h2.events.StreamEnded, refused)
        client.connection.send_data(refused, b"late" * 100)
        client.flush()
        client.wait(h2.events.StreamEnded, running)


@pytest.mark.parametrize(
    "odd",
    [
        [(b":method", b"GET"), (b":path", b"/\xff\xfe")],
        [(b":method", b"CONNECT"), (b":path", b"/livez"), (b":protocol", b"websocket")],
        [(b":method", b"G\xcbT"), (b":path", b"/livez")],
    ],
    ids=["path", "connect", "method"],
)
def test_odd_request_on_http2_does_not_end_other_streams(gateway, odd) -> None:
    """Hypercorn alone raises in the connection's task: every stream on it is cut."""
    client = Http2(gateway)
    with client.sock:
        running = client.ask("/v1/chat/completions", chat_bytes(say="z" * 50, delay_s=0.01))
        client.wait(h2.events.ResponseReceived, running)
        stream_id = client.connection.get_next_available_stream_id()
        client.connection.config.validate_outbound_headers = False
        client.connection.config.normalize_outbound_headers = False
        headers = [*odd, (b":scheme", b"http"), (b":authority", b"t")]
        client.connection.send_headers(stream_id, headers, end_stream=True)
        client.flush()
        client.wait(h2.events.StreamReset, stream_id)
        client.wait(h2.events.StreamEnded, running)
    assert not gateway.node.served[0].aborted


def test_upgrade_to_http2_with_broken_settings_only_closes(gateway) -> None:
    errors: list[dict[str, Any]] = []
    gateway.call(lambda: gateway.loop.set_exception_handler(lambda _, what: errors.append(what)))
    with gateway.connect() as sock:
        sock.sendall(
            b"GET /livez HTTP/1.1\r\nHost: t\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAAAAAA\r\n\r\n"
        )
        while sock.recv(65536):
            continue
    gateway.call(lambda: gateway.loop.set_exception_handler(None))
    assert errors == []


def without_window(gateway: Any, body: bytes) -> tuple[Http2, int]:
    """A stream whose client gives not one byte of window for the answer."""
    client = Http2(gateway)
    client.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    client.flush()
    stream_id = client.ask("/v1/chat/completions", body)
    deadline = time.monotonic() + 20
    while not gateway.node.served:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return client, stream_id


def test_http2_reader_without_window_is_bounded_and_settled(tmp_path, start) -> None:
    """Hypercorn alone takes the whole answer into memory and says that it was sent."""
    config = GatewayConfig(
        server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=0.5),
        stream=StreamConfig(send_stall_s=0.5),
    )
    with start(tmp_path, config) as running:
        endless = chat_bytes(say="s" * 1000, times=60, step=20, delay_s=0.001)
        client, _ = without_window(running, endless)
        with client.sock:
            running.wait_idle(15)
        assert running.node.served[0].aborted
        assert running.node.served[0].sent < 30_000
        ((status, produced, charge),) = rows_of(running)
        assert status == "client_left"
        assert produced > 0
        assert charge > 0


def test_client_that_leaves_between_settlement_and_last_byte_is_billed_once(gateway) -> None:
    before = len(rows_of(gateway))
    client, stream_id = without_window(gateway, chat_bytes(say="five5"))
    with client.sock:
        deadline = time.monotonic() + 20
        while len(rows := rows_of(gateway)) == before or rows[-1][0] == "open":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.connection.reset_stream(stream_id)
        client.flush()
        gateway.wait_idle()
    rows = rows_of(gateway)
    assert len(rows) == before + 1
    assert rows[-1][:2] == ("ok", 5)


def rows_of(gateway: Any) -> list[tuple[str, int, int]]:
    """(status, completion_tokens, charge) of all rows on disk, oldest first."""
    path = gateway.services.home.folder / LEDGER_NAME
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return connection.execute(
            "SELECT status, completion_tokens, charge_nano_usd FROM requests ORDER BY sequence"
        ).fetchall()
    finally:
        connection.close()


def test_oversized_header_list_on_http2_harms_only_its_connection(gateway) -> None:
    with gateway.client(http2=True) as client, pytest.raises(httpx.HTTPError):
        client.get("/v1/models", headers={f"x-{i}": "a" * 1000 for i in range(100)})
    with gateway.client() as client:
        assert client.get("/v1/models").status_code == 200


def with_admission(start: Any, tmp_path: Any, limits: AdmissionLimits) -> Any:
    config = GatewayConfig(
        server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=3.0), admission=limits
    )
    return start(tmp_path, config)


def test_shed_is_429_3040_with_advice_and_releases(tmp_path, start, ask) -> None:
    limits = AdmissionLimits(concurrent_requests=1, retry_after_s=0.05)
    with with_admission(start, tmp_path, limits) as running, running.client() as client:
        body = ask({"say": "abc", "gate": "shed"})

        def occupy() -> None:
            with running.client() as other:
                other.post("/v1/chat/completions", json=body)

        slow = threading.Thread(target=occupy)
        slow.start()
        while not running.node.served:
            time.sleep(0.005)
        shed = client.post("/v1/chat/completions", json=ask("x"))
        assert (shed.status_code, shed.json()["error"]["code"]) == (429, "capacity_exceeded")
        assert shed.json()["error"]["number"] == 3040
        assert (shed.headers["retry-after-ms"], shed.headers["x-should-retry"]) == ("50", "true")
        running.node.opened.add("shed")
        slow.join()
        running.wait_idle()
        assert client.post("/v1/chat/completions", json=ask("x")).status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=ask("x", stream=True)):
            pass  # left before reading: the slot comes back
        running.wait_idle()


def test_rate_is_per_key_and_told_in_headers(tmp_path, start, ask) -> None:
    limits = AdmissionLimits(requests_per_minute_per_key=2)
    with with_admission(start, tmp_path, limits) as running:
        with running.client() as client:
            began = time.monotonic()
            first = client.post("/v1/chat/completions", json=ask("x"))
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            client.post("/v1/chat/completions", json=ask("x"))
            third = client.post("/v1/chat/completions", json=ask("x"))
            assert (third.status_code, third.json()["error"]["code"]) == (
                429,
                "rate_limit_exceeded",
            )
            took_ms = (time.monotonic() - began) * 1000
            assert 29_990 - took_ms < int(third.headers["retry-after-ms"]) <= 30_000
        with running.client(key="other-key-0123456789abcd") as other:
            streamed = other.post("/v1/chat/completions", json=ask("x", stream=True))
            assert streamed.status_code == 200
            assert streamed.headers["x-ratelimit-remaining-requests"] == "1"


def test_drain_finishes_what_runs_and_takes_nothing_new(tmp_path, start, ask) -> None:
    result: list[str] = []
    config = GatewayConfig(server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=20.0))
    with start(tmp_path, config) as running, running.connect() as idle:

        def read() -> None:
            with running.client() as client:
                body = ask({"say": "w" * 30, "gate": "drains", "gate_after": 15}, stream=True)
                result.append(client.post("/v1/chat/completions", json=body).text)

        reader = threading.Thread(target=read)
        reader.start()
        while not running.node.served:
            time.sleep(0.005)
        running.stop()
        assert idle.recv(1) == b"", "idle ones end once it drains"
        with running.client() as late, pytest.raises(httpx.ConnectError):
            late.get("/livez")
        assert reader.is_alive()
        running.node.opened.add("drains")
        reader.join(20)
    assert result
    assert result[0].endswith("data: [DONE]\n\n")


def test_slow_reader_is_bounded_and_settled(tmp_path, start) -> None:
    """Nobody reads: kernel and gateway hold a bounded number of tokens, then the stream ends."""
    config = GatewayConfig(
        server=ServerConfig(
            port=0, link_port=0, admin_port=0, drain_s=0.5, send_buffer_bytes=16 << 10
        ),
        stream=StreamConfig(send_stall_s=0.5),
    )
    with start(tmp_path, config) as running:
        body = {
            "model": "tiny",
            "stream": True,
            "messages": script(say="s" * 1000, times=60, step=100),
        }
        sock = running.connect()
        sock.setsockopt(1, 8, 4096)  # SOL_SOCKET, SO_RCVBUF
        sock.sendall(running.raw(msgspec.json.encode(body)))
        while not running.node.served:
            time.sleep(0.005)
        running.wait_idle(15)
        assert running.node.served[0].aborted
        assert running.node.served[0].sent < 60_000
        sock.close()
