"""Agents' sessions that share a system prompt, played against a whole Kagari turn by turn.

A turn resends all before it, so what is found of it is what some node computed. Sessions speak in
an order that is shuffled anew for each turn; the text is the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.cli.client import ChatReply, stream_chat
from gateway.demo.scenario import AREAS, NOUNS, VERBS, Message, system_prompt
from gateway.demo.stack import Stack

SEED = 20261130
SYSTEM_CHARACTERS = 3000  # some 650 tokens that all sessions share
FILE_WORDS = 320  # what a session read first
RESULT_WORDS = 90  # what a tool returned, each turn
ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Turn:
    session: int
    turn: int
    reply: ChatReply


def play(stack: Stack, *, num_sessions: int, num_turns: int) -> list[Turn]:
    """One turn at a time, each session under its own affinity key. Raises what stream_chat does."""
    chance = random.Random(SEED)
    histories = [_opening(chance) for _ in range(num_sessions)]
    turns: list[Turn] = []
    for turn in range(num_turns):
        for session in chance.sample(range(num_sessions), num_sessions):
            history = histories[session]
            history.append({"role": "user", "content": _words(chance, RESULT_WORDS)})
            reply = say(stack, history, session)
            history.append({"role": "assistant", "content": reply.text})
            turns.append(Turn(session, turn, reply))
    return turns


def say(stack: Stack, history: Sequence[Message], session: int) -> ChatReply:
    body = {
        "model": stack.model,
        "messages": history,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    return stream_chat(stack.api, body, {"x-session-affinity": f"agent-{session}"})


def hit_ratio(turns: Sequence[Turn]) -> float:
    """Prompt tokens that were found, of all."""
    return sum(one.reply.cached_tokens for one in turns) / sum(
        one.reply.prompt_tokens for one in turns
    )


def moves(turns: Sequence[Turn]) -> float:
    """Of the turns that had one before, the share that ran on another node than it."""
    last: dict[int, str] = {}
    moved = later = 0
    for one in turns:
        if one.session in last:
            later += 1
            moved += last[one.session] != one.reply.node
        last[one.session] = one.reply.node
    return moved / later if later else 0.0


def _opening(chance: random.Random) -> list[Message]:
    return [
        {"role": "system", "content": system_prompt()[:SYSTEM_CHARACTERS]},
        {"role": "user", "content": f"The file: {_words(chance, FILE_WORDS)}"},
        {"role": "assistant", "content": "I have read it."},
    ]


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices((*VERBS, *NOUNS, *AREAS), k=count))
