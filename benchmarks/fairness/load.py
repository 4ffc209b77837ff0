"""A tenant that keeps an engine flooded, and one that asks now and then beside it.

The greedy tenant has so many prompts outstanding, and another one as soon as one is answered. The
modest one asks by the clock, whatever becomes of what it asked before. No two prompts begin alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.pd.load import FRAME_TOKENS, WORDS
from gateway.cli.client import ChatReply, Server, stream_chat

MODEST_TOKENS = 150
ANSWER_TOKENS = 4
EVERY_S = 2.0  # that the modest tenant asks, half of it to one and a half
WARM_S = 2.0  # of flood, before it is measured
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Flood:
    num_prompts: int  # outstanding at any time
    tokens: int  # of each

    def __str__(self) -> str:
        return f"{self.num_prompts} prompts of {self.tokens:,} tokens outstanding"


@dataclass(frozen=True, slots=True)
class Played:
    """Of the modest tenant: seconds to each first token, and the texts. greedy_tokens_per_s: of its
    prompts, those whose first token came while the modest one asked."""

    ttft_s: list[float]
    texts: list[str]
    greedy_tokens_per_s: float


def play(
    model: str, modest: Server, *, seconds: float, seed: int, flood: Flood | None, greedy: Server
) -> Played:
    """Raises what stream_chat raises."""

    def ask(who: Server, name: str, tokens: int) -> ChatReply:
        words = random.Random(f"{seed} {name}").choices(WORDS, k=tokens - FRAME_TOKENS)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": " ".join([name, *words])}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        return stream_chat(who, body, {}, timeout_s=PATIENCE_S)

    began = time.monotonic() + (WARM_S if flood else 0.0)
    until = began + seconds

    def flood_on(lane: int, tokens: int) -> list[ChatReply]:
        replies: list[ChatReply] = []
        while time.monotonic() < until:
            replies.append(ask(greedy, f"greedy {lane} {len(replies)}", tokens))
        return replies

    def come(at_s: float, index: int) -> ChatReply:
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        return ask(modest, f"modest {index}", MODEST_TOKENS)

    times = list(arrivals(seed, seconds))
    num_prompts = flood.num_prompts if flood else 0
    with ThreadPoolExecutor(len(times) + num_prompts) as pool:
        lanes = [pool.submit(flood_on, lane, flood.tokens) for lane in range(num_prompts) if flood]
        asked = [pool.submit(come, at_s, index) for index, at_s in enumerate(times)]
        replies = [one.result() for one in asked]
        told = [reply for lane in lanes for reply in lane.result()]
    computed = sum(
        reply.prompt_tokens for reply in told if began <= reply.started_at + reply.ttft_s < until
    )
    return Played(
        [reply.ttft_s for reply in replies], [reply.text for reply in replies], computed / seconds
    )


def arrivals(seed: int, seconds: float) -> Iterator[float]:
    """Seconds after the begin at which the modest tenant asks."""
    chance = random.Random(f"{seed} arrivals")
    at_s = 0.0
    while (at_s := at_s + chance.uniform(0.5, 1.5) * EVERY_S) < seconds:
        yield at_s
