"""A very long prompt on a real engine: it costs its sender, and nobody else more than its steps."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.config import DEFAULT_STEP_TOKENS
from gateway.cli.client import call, sse_data
from gateway.demo.stack import Stack
from tests.cluster.byte_llama import save_byte_llama

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SENTENCE = "The lantern at the end of the pier burns on. "
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-layer Llama over single bytes, with room for 262,144 tokens; it never stops."""
    path = tmp_path_factory.mktemp("folder") / "long-llama"
    save_byte_llama(
        path,
        template=TEMPLATE,
        seed=3,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1 << 18,
    )
    return path


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process has used so far."""

    cpu_s: float
    rss_bytes: int


def cost_of(pid: int) -> Cost:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Cost((int(fields[11]) + int(fields[12])) / TICKS, pages * os.sysconf("SC_PAGE_SIZE"))


def gateway_pid(stack: Stack) -> int:
    """The child of `kagari serve` that runs the gateway."""
    main = stack.process.pid
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    (pid,) = (
        int(child)
        for child in children
        if b"gateway" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    )
    return pid


@dataclass
class Companion:
    """A short conversation that decodes while somebody's long prompt is computed."""

    stack: Stack
    times: list[float] = field(default_factory=list)  # of each chunk with text
    characters: list[int] = field(default_factory=list)  # in it: a character is a token here
    ended: bool = False

    def run(self) -> None:
        connection = self.stack.api.connect(600)
        body = {
            "model": self.stack.model,
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 20_000,
            "stream": True,
        }
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), self.stack.api.headers()
            )
            for event in sse_data(connection.getresponse()):
                text = event["choices"][0]["delta"].get("content")
                if text:
                    self.times.append(time.monotonic())
                    self.characters.append(len(text))
                if self.ended:
                    return
        except (OSError, http.client.HTTPException):
            assert self.ended
        finally:
            connection.close()

    def told_between(self, start: float, end: float) -> int:
        """Characters that came in between."""
        return sum(
            count
            for at, count in zip(self.times, self.characters, strict=True)
            if start <= at <= end
        )


def ask(stack: Stack, tokens: int) -> tuple[dict[str, Any], float, float]:
    """A prompt of so many tokens: the answer, and when it was sent and answered."""
    text = (SENTENCE * (tokens // len(SENTENCE) + 1))[:tokens]
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
    }
    start = time.monotonic()
    answer = call(stack.api, "POST", "/v1/chat/completions", body, timeout_s=900)
    return answer, start, time.monotonic()


@pytest.mark.parametrize(
    "tokens",
    [pytest.param(20_000, id="20k"), pytest.param(200_000, id="200k", marks=pytest.mark.slow)],
)
def test_a_long_prompt_costs_others_at_most_a_step_and_the_gateway_little(
    folder: Path, tmp_path: Path, tokens: int
) -> None:
    flags = ("--port", "0", "--model", str(folder), "--kv-device-tokens", str(tokens + 40_000))
    with Stack(tmp_path / "home", *flags) as stack:
        pid = gateway_pid(stack)
        ask(stack, 2_000)  # what is made once is made
        companion = Companion(stack)
        thread = threading.Thread(target=companion.run)
        thread.start()
        while len(companion.times) < 20:
            time.sleep(0.01)
            assert thread.is_alive()
        before = cost_of(pid)
        peak = before.rss_bytes
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.02):
                peak = max(peak, cost_of(pid).rss_bytes)

        watcher = threading.Thread(target=watch)
        watcher.start()
        answer, start, end = ask(stack, tokens)
        done.set()
        watcher.join()
        after = cost_of(pid)
        told = companion.told_between(start, end)
        chunks = sum(start <= at <= end for at in companion.times)
        assert thread.is_alive()  # it spoke to the end
        companion.ended = True
        thread.join(30)
        warm, _, _ = ask(stack, tokens)
    assert answer["usage"]["prompt_tokens"] == tokens
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens - 64
    # Each step of the long prompt holds a row of the companion, so nobody waits for two of them;
    # some of the last are still on their way to a client on a busy machine.
    steps = tokens // DEFAULT_STEP_TOKENS
    print(f"{tokens} tokens in {end - start:.1f} s; {told} tokens told beside {steps} steps")
    assert told >= 0.8 * steps
    # Beside the text itself (kept a few times over for a moment): ids, keys, the frame to the node.
    assert peak - before.rss_bytes < (40 << 20) + 150 * tokens
    # The companion's chunks cost what they cost; the prompt's own share is text and hashing.
    spent = after.cpu_s - before.cpu_s - chunks * 200e-6
    print(f"gateway: {spent:.2f} CPU s, +{(peak - before.rss_bytes) / 2**20:.0f} MiB")
    assert spent < 1.0 + tokens * 10e-6
