"""The life of an HTTP/1.1 connection: idle, busy, closed by either side, and when draining."""

from __future__ import annotations

import json
import time

import pytest

from gateway.config import GatewayConfig, ServerConfig

KEEP_ALIVE_S = 1.2  # without an end it would be the socket's own limit, an error
PATIENT = GatewayConfig(server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=20.0))
GET = b"GET /livez HTTP/1.1\r\nHost: t\r\n\r\n"


@pytest.fixture
def brief(tmp_path, start):
    """A gateway whose idle connections end soon."""
    server = ServerConfig(port=0, link_port=0, admin_port=0, drain_s=3.0, keep_alive_s=KEEP_ALIVE_S)
    with start(tmp_path, GatewayConfig(server=server)) as running:
        yield running


def wait_end(sock) -> float:
    """When it had come."""
    assert sock.recv(1) == b""
    return time.monotonic()


def test_idle_connection_ends_after_the_keep_alive_time(brief) -> None:
    began = time.monotonic()
    with brief.connect() as fresh, brief.connect() as used:
        time.sleep(KEEP_ALIVE_S / 8)
        asked = time.monotonic()
        used.sendall(GET)
        assert used.recv(4096).endswith(b"ok\n")
        assert wait_end(fresh) - began >= KEEP_ALIVE_S * 0.99
        assert wait_end(used) - asked >= KEEP_ALIVE_S * 0.99


def test_running_answer_outlasts_the_keep_alive_time(brief) -> None:
    script = json.dumps({"say": "abc", "first_s": 1.5 * KEEP_ALIVE_S})
    body = {"model": "tiny", "messages": [{"role": "user", "content": script}]}
    with brief.connect() as sock:
        sock.sendall(brief.raw(json.dumps(body).encode()))
        assert sock.recv(16).startswith(b"HTTP/1.1 200")


def test_idle_connections_end_at_once_when_the_gateway_drains(tmp_path, start) -> None:
    with (
        start(tmp_path, PATIENT) as running,
        running.connect() as fresh,
        running.connect() as used,
    ):
        used.sendall(GET)
        used.recv(4096)
        running.stop()
        wait_end(fresh)
        wait_end(used)


def test_last_answer_of_a_draining_gateway_ends_its_connection(tmp_path, start) -> None:
    script = json.dumps({"say": "abc", "gate": "drains"})
    body = {"model": "tiny", "messages": [{"role": "user", "content": script}]}
    with start(tmp_path, PATIENT) as running, running.connect() as idle, running.connect() as sock:
        sock.sendall(running.raw(json.dumps(body).encode()))
        while not running.node.served:
            time.sleep(0.005)
        running.stop()
        wait_end(idle)
        running.node.opened.add("drains")
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason"' in answer


def test_connection_closed_by_its_client_while_idle_is_not_kept(gateway) -> None:
    with gateway.connect() as sock:
        sock.sendall(GET)
        sock.recv(4096)
        sock.shutdown(1)
        wait_end(sock)


def test_answer_without_a_body_has_its_head(gateway) -> None:
    with gateway.connect() as sock:
        sock.sendall(GET.replace(b"GET", b"HEAD") * 2)
        answers = sock.recv(65536)
        while answers.count(b"\r\n\r\n") < 2:
            answers += sock.recv(65536)
    assert answers.count(b"HTTP/1.1 200") == 2
    assert b"ok\n" not in answers
