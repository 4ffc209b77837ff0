"""Act 3: four streams run when a long prompt lands, and go on beside it or wait for it.

mixed     two nodes that do both, in steps of 512 tokens, then of 256; two streams on each
split     the same two nodes, of which one computes prompts and the other continues them
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, quantiles

from gateway.cli.client import ChatReply, HttpError, StreamFailed, stream_chat
from gateway.demo.scenario import AREAS, NOUNS, VERBS
from gateway.demo.stack import Stack, StackFailed

NUM_STREAMS = 4
STREAM_TOKENS = 96  # and one for each 24 of the prompt: they outlast it where they wait for it
RUNNING_TOKENS = 8  # of each stream, when the prompt lands
STREAM_WORDS = 60
SPARK_CHARS = 28
SPARKS = "▁▂▃▄▅▆▇█"
LEAST_MS = 16  # of the lowest spark; each next one is twice as much


@dataclass(frozen=True, slots=True)
class Way:
    """How two nodes of one thread each share the work. Without an environment ours is chosen."""

    name: str
    flags: tuple[str, ...]
    environment: dict[str, str]


# In turn, so that two streams are on the prompt's node and two are not.
_IN_TURN = {"KAGARI_ROUTING__POLICY": "round_robin"}
COARSE = Way("mixed, chunk 512", ("--nodes", "2", "--step-tokens", "512"), _IN_TURN)
FINE = Way("mixed, chunk 256", ("--nodes", "2", "--step-tokens", "256"), _IN_TURN)
SPLIT = Way("split", ("--prefill", "1", "--decode", "1", "--split", "always"), {})
WAYS = (COARSE, FINE, SPLIT)


@dataclass(frozen=True, slots=True)
class Landing:
    """What became of the streams and of the prompt that landed among them."""

    way: str
    streams: tuple[ChatReply, ...]
    prompt: ChatReply

    @property
    def beside(self) -> list[ChatReply]:
        """The streams whose tokens come from the node that the prompt's come from."""
        return [stream for stream in self.streams if stream.node == self.prompt.node]

    def ms_per_token(self) -> list[float]:
        """Of each token beside the prompt, from its landing to its first token."""
        landed, spoke = self.prompt.started_at, self.prompt.pieces_at[0]
        return [
            (after - before) * 1e3
            for stream in self.beside
            for before, after in pairwise(stream.pieces_at)
            if landed < after and before < spoke
        ]

    def p90_ms(self) -> float:
        """Raises StackFailed where the prompt met no stream."""
        found = self.ms_per_token()
        if len(found) < 2:
            raise StackFailed(f"{self.way}: no stream ran beside the prompt")
        return quantiles(found, n=10, method="inclusive")[-1]

    def answers(self) -> tuple[str, ...]:
        return (*(stream.text for stream in self.streams), self.prompt.text)


def sparkline(landing: Landing) -> str:
    """ms per token beside the prompt, from its landing to its first token; blank: none came."""
    landed, spoke = landing.prompt.started_at, landing.prompt.pieces_at[0]
    return "".join(
        _spark(landing, landed + (spoke - landed) * (char + 0.5) / SPARK_CHARS)
        for char in range(SPARK_CHARS)
    )


def _spark(landing: Landing, at: float) -> str:
    waits = [
        after - before
        for stream in landing.beside
        for before, after in pairwise(stream.pieces_at)
        if before <= at < after
    ]
    if not waits:
        return " "
    level = math.floor(math.log2(mean(waits) * 1e3 / LEAST_MS))
    return SPARKS[min(max(level, 0), len(SPARKS) - 1)]


def play_landing(stack: Stack, way: Way, *, prompt_tokens: int) -> Landing:
    """The same five texts each time. Raises StackFailed."""
    texts = _texts(prompt_tokens)
    prompt = next(texts)
    all_run, left = threading.Event(), [RUNNING_TOKENS] * NUM_STREAMS
    tokens = STREAM_TOKENS + prompt_tokens // 24

    def stream(index: int, text: str) -> ChatReply:
        def count() -> None:
            left[index] -= 1
            if max(left) <= 0:
                all_run.set()

        return _say(stack, text, tokens, count)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(stream, index, text) for index, text in enumerate(texts)]
        try:
            if not all_run.wait(60):
                raise StackFailed(f"{way.name}: the streams do not run; {stack.warnings()}")
            landed = _say(stack, prompt, 8, lambda: None)
            streams = tuple(future.result(timeout=120) for future in running)
        except (StreamFailed, HttpError, OSError) as error:
            raise StackFailed(f"{way.name}: {error}\n    {stack.warnings()}") from error
    return Landing(way.name, streams, landed)


def _texts(prompt_tokens: int) -> Iterator[str]:
    """The long one, then those of the streams; nearly each word is a token."""
    chance = random.Random(3)
    for words in (prompt_tokens, *[STREAM_WORDS] * NUM_STREAMS):
        yield " ".join(chance.choices((*VERBS, *NOUNS, *AREAS), k=words))


def _say(stack: Stack, text: str, tokens: int, on_text: Callable[[], object]) -> ChatReply:
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return stream_chat(stack.api, body, {}, on_text=on_text)
