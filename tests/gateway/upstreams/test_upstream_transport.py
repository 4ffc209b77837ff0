"""Connections to a foreign server outlive every way in which a request of theirs can end."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import pytest

from gateway.upstreams.faults import TransportFault
from gateway.upstreams.transport import Connections
from tests.gateway.upstreams.scripted_upstream import Exchange, start_upstream

PATH = "/v1/chat/completions"


def connections(url: str) -> Connections:
    return Connections(url, api_key=None, connect_s=20.0)


async def ask(to: Connections, *, first_byte_s: float = 20.0, idle_s: float = 20.0) -> bytes:
    async with to.post(PATH, b"{}", {}, first_byte_s=first_byte_s, idle_s=idle_s) as answer:
        return await answer.whole(1 << 20)


@pytest.mark.anyio
# anyio drops a socket that was cancelled just when it had connected; it is closed when collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_requests_cancelled_at_any_moment_give_their_connections_back() -> None:
    """While connecting, before the head, within the body, while closing: none is left open."""
    dice = random.Random(5)
    slow = Exchange((("wait", 0.004), b"x" * 100, ("wait", 0.004), b"y"))
    with start_upstream(lambda _: slow) as upstream:
        to = connections(upstream.url)
        rounds, deadline = 0, time.monotonic() + 20
        while rounds < 20 or (len(upstream.asked) <= 40 and time.monotonic() < deadline):
            rounds += 1
            tasks = [asyncio.create_task(ask(to)) for _ in range(6)]
            for task in tasks:
                await asyncio.sleep(dice.random() * 0.004)
                task.cancel()
            await asyncio.wait(tasks, timeout=20)
            assert all(task.done() for task in tasks)
        assert await asyncio.wait_for(ask(to), 20) == b"x" * 100 + b"y"
        assert len(upstream.asked) > 40
        deadline = time.monotonic() + 20
        while upstream.num_open > len(to._kept):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await to.close()


@pytest.mark.anyio
async def test_what_can_go_wrong_has_a_name_and_an_end() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(TransportFault) as refused:
        await ask(connections(f"http://127.0.0.1:{port}"))
    assert refused.value.kind == "connect"
    cases = {
        "silent": Exchange((("hang", None),)),
        "lost": Exchange((b"x", ("wait", 0.05), ("reset", None))),
    }
    for kind, exchange in cases.items():
        with start_upstream(lambda _, told=exchange: told) as upstream:
            began = time.monotonic()
            to = connections(upstream.url)
            with pytest.raises(TransportFault) as fault:
                await ask(to, first_byte_s=0.3 if kind == "silent" else 20.0)
            assert fault.value.kind == kind
            assert time.monotonic() - began < 15
            await to.close()
    with start_upstream(lambda _: Exchange((b"x", ("hang", None)))) as upstream:
        to = connections(upstream.url)
        with pytest.raises(TransportFault) as fault:
            await ask(to, idle_s=0.3)
        assert fault.value.kind == "silent"
        await to.close()


@pytest.mark.anyio
async def test_a_connection_is_used_again_and_a_whole_answer_is_bounded() -> None:
    with start_upstream(lambda _: Exchange((b"x" * 100,))) as upstream:
        to = connections(upstream.url)
        for _ in range(5):
            assert len(await ask(to)) == 100
        assert upstream.num_connections == 1
        async with to.post(PATH, b"{}", {}, first_byte_s=20, idle_s=20) as answer:
            with pytest.raises(TransportFault):
                await answer.whole(99)
        status, body = await to.get("/v1/models", 20.0)
        assert status == 200
        assert b"their-model" in body
        await to.close()


@pytest.mark.anyio
async def test_nothing_of_this_processs_environment_is_used(monkeypatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with start_upstream(lambda _: Exchange((b"x",))) as upstream:
        to = connections(upstream.url)
        assert await ask(to) == b"x"
        assert upstream.asked[0].headers["accept-encoding"] == "identity"
        await to.close()
