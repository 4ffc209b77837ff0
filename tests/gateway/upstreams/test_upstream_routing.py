"""Among upstreams of one model: where the prefix is, where the session was, where there is room."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.gateway.api.scripted_node import TEMPLATE, TOKENIZER
from tests.gateway.upstreams.conftest import until
from tests.gateway.upstreams.scripted_upstream import (
    Exchange,
    chunk,
    sse,
    start_upstream,
    usage_chunk,
)
from tests.gateway.upstreams.test_relay import rows

CHAT = "/v1/chat/completions"
GOOD = Exchange((sse(chunk("ok", finish="stop"), usage_chunk(4, 1), "[DONE]"),))
PAGE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files as a model's source has them: a token is a byte."""
    made = tmp_path_factory.mktemp("text")
    (made / "tokenizer.json").write_text(TOKENIZER.to_str())
    (made / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def ask(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "their-model", "messages": messages, "stream": True, **fields}


def prompt_ids(text: str) -> list[int]:
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant"  # the newline goes
    return TOKENIZER.encode(rendered, add_special_tokens=False).ids


@contextmanager
def two(relayed: Any, script: Any = lambda _: GOOD, **settings: Any) -> Iterator[Any]:
    with start_upstream(script) as one, start_upstream(script) as other:
        tables = [
            {"url": up.url, "name": name, **settings} for name, up in (("a", one), ("b", other))
        ]
        with relayed(*tables) as gateway, gateway.client() as client:
            yield gateway, client, {"a": one, "b": other}


def test_with_a_bundle_prompts_are_counted_and_go_where_their_prefix_is(relayed, folder) -> None:
    """However often other prompts run elsewhere, a conversation's turns stay where it began."""
    with two(relayed, tokenizer=str(folder), page_size=PAGE) as (gateway, client, _):
        homes = {}
        for turn in range(3):
            for talk in range(16):  # all on one side by chance: once in 32,768 runs
                text = f"conversation {talk} " + "x" * 400 * (turn + 1)
                reply = client.post(CHAT, json=ask(text))
                node = reply.headers["x-kagari-node"]
                assert homes.setdefault(talk, node) == node, (turn, talk)
        assert set(homes.values()) == {"a", "b"}
        found = rows(gateway)
        assert found[0]["admitted_prompt_tokens"] == len(prompt_ids("conversation 0 " + "x" * 400))
        assert all(row["page_digest"] is not None for row in found)
        too_long = client.post(CHAT, json=ask("y" * 5000))
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        assert "4096" in too_long.json()["error"]["message"]
        pictures = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        body = {**ask(""), "messages": [{"role": "user", "content": pictures}]}
        assert client.post(CHAT, json=body).status_code == 200, "what we cannot read is passed on"


def test_without_a_bundle_sessions_stay_and_others_go_where_there_is_room(relayed) -> None:
    gate = threading.Event()

    def script(asked: Any) -> Exchange:
        return (
            Exchange((("until", gate), *GOOD.pieces)) if asked.body.get("user") == "wait" else GOOD
        )

    with two(relayed, script) as (gateway, client, ups):
        for session in range(6):
            headers = {"x-session-affinity": f"s{session}"}
            replies = [client.post(CHAT, json=ask("z" * 3000), headers=headers) for _ in range(3)]
            assert len({reply.headers["x-kagari-node"] for reply in replies}) == 1
            told = [reply.headers["x-kagari-affinity"] for reply in replies]
            assert told == ["new", "hit", "hit"]
        with gateway.connect() as sock:
            body = json.dumps(ask("w" * 60_000, user="wait")).encode()
            sock.sendall(gateway.raw(body))
            deadline = time.monotonic() + 20
            while not (busy := {name for name, up in ups.items() if is_waiting(up)}):
                assert time.monotonic() < deadline
            nodes = Counter(
                client.post(CHAT, json=ask(f"v{n}")).headers["x-kagari-node"] for n in range(8)
            )
            assert set(nodes) == {"a", "b"} - busy
            gate.set()


def is_waiting(upstream: Any) -> bool:
    return any(one.body.get("user") == "wait" and not one.is_answered for one in upstream.asked)


class Publisher:
    """Publishes as vLLM does, and replays what it kept."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.replay = self.context.socket(zmq.ROUTER)
        self.replay_port = self.replay.bind_to_random_port("tcp://127.0.0.1")
        self.kept: list[bytes] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._replay, daemon=True)
        self.thread.start()

    def publish(self, *events: Any, lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        number = len(self.kept).to_bytes(8, "big")
        self.kept.append(payload)
        if not lost:
            self.socket.send_multipart((b"kv", number, payload))

    def _replay(self) -> None:
        while not self.stop.is_set():
            if not self.replay.poll(50):
                continue
            client, _, first = self.replay.recv_multipart()
            for number in range(int.from_bytes(first, "big"), len(self.kept)):
                answer = (client, b"", number.to_bytes(8, "big"), self.kept[number])
                self.replay.send_multipart(answer)
            self.replay.send_multipart((client, b"", b"\xff" * 8, b""))

    def close(self) -> None:
        self.stop.set()
        self.thread.join(5)
        self.context.destroy(linger=0)


def test_page_events_over_zmq_say_exactly_where_a_prompt_is(relayed, folder) -> None:
    """Stored before we listen, one message lost and replayed, then evicted: routing follows."""
    publishers = [Publisher(), Publisher()]
    text = "shared prefix " + "q" * 700
    ids = prompt_ids(text)

    def stored(first: int, count: int) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": list(range(first + 1, first + count + 1)),
            "parent_block_hash": first or None,
            "token_ids": ids[first * 32 : (first + count) * 32],
            "block_size": 32,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }

    try:
        publishers[1].publish(stored(0, 4))
        with start_upstream(lambda _: GOOD) as one, start_upstream(lambda _: GOOD) as other:
            tables = [
                {
                    **{"url": up.url, "name": name, "dialect": "vllm", "cache_salt": False},
                    **{"tokenizer": str(folder), "page_size": PAGE},
                    "kv_events": (f"tcp://127.0.0.1:{told.port}",),
                    "kv_replay": (f"tcp://127.0.0.1:{told.replay_port}",),
                }
                for name, up, told in zip("ab", (one, other), publishers, strict=True)
            ]
            with relayed(*tables) as gateway, gateway.client() as client:
                servers = gateway.services.upstreams.servers
                until(lambda: servers[1].told is not None and len(servers[1].told) == 2)
                assert client.post(CHAT, json=ask(text)).headers["x-kagari-node"] == "b"
                publishers[0].publish({"type": "AllBlocksCleared"})
                publishers[0].publish(stored(0, 6), lost=True)
                for number in range(6, 22, 4):
                    publishers[0].publish(stored(number, 4))
                pages = len(ids) // PAGE
                until(lambda: servers[0].told is not None and len(servers[0].told) >= pages - 1)
                for _ in range(3):
                    assert client.post(CHAT, json=ask(text)).headers["x-kagari-node"] == "a"
                publishers[0].publish({"type": "AllBlocksCleared"})
                until(lambda: len(servers[0].told) == 0)
                assert client.post(CHAT, json=ask(text)).headers["x-kagari-node"] == "b"
                (view, _) = gateway.call(lambda: gateway.services.upstreams.views())
                assert view.residency == "events"
    finally:
        for publisher in publishers:
            publisher.close()
