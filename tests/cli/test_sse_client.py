"""The commands' own reader of event streams: whole events from any cuts, and no false ends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gateway.cli.client import Server, StreamFailed, stream_chat

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 1},
}
ASKED = b'"stream_options": {"include_usage": true}}'  # the last of the body
EVENTS = (
    ": keep-alive\n\n"
    + "".join(
        f"data: {json.dumps({'choices': [{'delta': {'content': text}}]}, ensure_ascii=False)}\n\n"
        for text in ("héllo ", "[DONE] is text here: 東京 👩‍👩‍👧")
    )
    + f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n"
)


@contextmanager
def server_says(body: bytes, *, cut: int) -> Iterator[Server]:
    """One answer to one request, in HTTP chunks of `cut` bytes, then the end of the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            request = b""
            while not request.endswith(ASKED):  # what stays unread would reset the connection
                request += connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            with suppress(ConnectionError):  # a client that has read the last event may leave
                for at in range(0, len(body), cut):
                    piece = body[at : at + cut]
                    connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
                connection.sendall(b"0\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", "secret")
    finally:
        thread.join(10)
        listener.close()


@pytest.mark.parametrize("cut", [1, 7, 100_000])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_network_chunks_are_not_events(cut, newline) -> None:
    body = (EVENTS + "data: [DONE]\n\n").replace("\n", newline).encode()
    with server_says(body, cut=cut) as server:
        reply = stream_chat(server, {"messages": []}, {}, timeout_s=10)
    assert reply.text == "héllo [DONE] is text here: 東京 👩‍👩‍👧"
    assert (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens) == (3, 1, 2)


def test_a_stream_that_ends_without_done_does_not_look_complete() -> None:
    with (
        server_says(EVENTS.encode(), cut=64) as server,
        pytest.raises(StreamFailed, match="without"),
    ):
        stream_chat(server, {"messages": []}, {}, timeout_s=10)


def test_an_error_event_is_told_as_it_came() -> None:
    body = EVENTS + 'data: {"error": {"code": "node_lost", "message": "node n1 was lost"}}\n\n'
    with (
        server_says(body.encode(), cut=64) as server,
        pytest.raises(StreamFailed, match="node n1 was lost"),
    ):
        stream_chat(server, {"messages": []}, {}, timeout_s=10)
