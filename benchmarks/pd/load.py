"""The load of coding agents: sessions that grow by turns, and long cold prompts among them.

An agent waits for an answer, runs a tool for some seconds, and resends everything with what the
tool returned; an answer is as long as a tool call. Cold prompts come by the clock, whatever becomes
of those before, as those of agents that hand work to others: some at once, of one length, each of a
new session. The seed gives every text, length, pause and arrival.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import mean

from gateway.cli.client import ChatReply, stream_chat
from gateway.demo.scenario import AREAS, NOUNS, VERBS, Message
from gateway.demo.stack import Stack

WORDS = (*VERBS, *NOUNS, *AREAS)  # each a token, with the space before it
FRAME_TOKENS = 30  # of the template around a prompt's own words
PATIENCE_S = 300.0  # of one answer


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranges are (least, most), drawn evenly; they come ½ to 1½ of their mean gap apart."""

    agents: int = 12
    opening_tokens: int = 400
    result_tokens: tuple[int, int] = (60, 160)
    tool_s: tuple[float, float] = (6.0, 12.0)
    cold_tokens: tuple[int, int] = (1500, 5000)
    hand_out: int = 2  # cold prompts at once
    answer_tokens: tuple[int, int] = (24, 64)
    cold_per_s: float = 0.1  # on the mean

    def times(self, load: float) -> Shape:
        return replace(
            self, agents=max(1, round(self.agents * load)), cold_per_s=self.cold_per_s * load
        )

    def __str__(self) -> str:
        return (
            f"{self.agents} agents that open with {self.opening_tokens} tokens, get "
            f"{_range(self.result_tokens)} of a tool after {_range(self.tool_s)} s; "
            f"{self.hand_out} cold prompts of {_range(self.cold_tokens)} each "
            f"{self.hand_out / self.cold_per_s:.1f} s; answers of {_range(self.answer_tokens)}"
        )


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:,g}–{ends[1]:,g}"


@dataclass(frozen=True, slots=True)
class Answer:
    """name: whose, and which; the same in every run with a seed. new_tokens: of the prompt, what no
    cache could have had."""

    name: str
    new_tokens: int
    reply: ChatReply


class _Agent:
    def __init__(self, stack: Stack, shape: Shape, name: str, chance: random.Random) -> None:
        self._stack, self._shape, self._name, self._chance = stack, shape, name, chance
        self._history: list[Message] = []
        self._turn = 0
        self._known = 0  # tokens of the history

    def ask(self, num_words: int) -> Answer:
        self._turn += 1
        words = " ".join(self._chance.choices(WORDS, k=num_words))
        self._history.append({"role": "user", "content": words})
        body = {
            "model": self._stack.model,
            "messages": self._history,
            "max_tokens": self._chance.randint(*self._shape.answer_tokens),
            "temperature": 0,
            "ignore_eos": True,
        }
        headers = {"x-session-affinity": self._name}
        reply = stream_chat(self._stack.api, body, headers, timeout_s=PATIENCE_S)
        self._history.append({"role": "assistant", "content": reply.text})
        new = reply.prompt_tokens - self._known
        self._known = reply.prompt_tokens + reply.completion_tokens
        return Answer(f"{self._name}/{self._turn}", max(new, 1), reply)

    def work(self, until: float) -> list[Answer]:
        """Turn after turn; the last is asked before until."""
        answers = []
        while True:
            pause_s = self._chance.uniform(*self._shape.tool_s)
            words = self._chance.randint(*self._shape.result_tokens)
            if time.monotonic() + pause_s >= until:
                return answers
            time.sleep(pause_s)
            answers.append(self.ask(words))

    def come(self, at: float, num_words: int) -> list[Answer]:
        time.sleep(max(0.0, at - time.monotonic()))
        return [self.ask(num_words)]


def play(stack: Stack, shape: Shape, *, seed: int, seconds: float) -> list[Answer]:
    """All that was asked within these seconds, from when every agent's session is open.

    Raises what stream_chat raises.
    """

    def agent(name: str) -> _Agent:
        return _Agent(stack, shape, f"{seed}-{name}", random.Random(f"{seed} {name}"))

    arrivals = list(cold_arrivals(shape, seed=seed, seconds=seconds))
    with ThreadPoolExecutor(shape.agents + len(arrivals)) as pool:
        agents = [agent(f"agent{index}") for index in range(shape.agents)]
        list(pool.map(lambda one: one.ask(shape.opening_tokens), agents))
        began = time.monotonic()
        asked = [pool.submit(one.work, began + seconds) for one in agents]
        asked += [
            pool.submit(agent(f"cold{index}").come, began + at_s, num_words)
            for index, (at_s, num_words) in enumerate(arrivals)
        ]
        return [answer for future in asked for answer in future.result()]


def cold_arrivals(shape: Shape, *, seed: int, seconds: float) -> Iterator[tuple[float, int]]:
    """(seconds after the begin, words) of each cold prompt."""
    chance = random.Random(f"{seed} cold")
    gap_s = shape.hand_out / shape.cold_per_s
    at_s = -gap_s / 2
    while (at_s := at_s + chance.uniform(0.5, 1.5) * gap_s) < seconds:
        num_words = chance.randint(*shape.cold_tokens) - FRAME_TOKENS
        yield from [(at_s, num_words)] * shape.hand_out


def prefill_rate(stack: Stack, shape: Shape) -> float:
    """Tokens a second of an idle engine: a cold prompt of the mean length."""
    asker = _Agent(stack, shape, "rate", random.Random(0))
    reply = asker.ask(round(mean(shape.cold_tokens)) - FRAME_TOKENS).reply
    return reply.prompt_tokens / reply.ttft_s
