"""Row agents_32: 32 conversations of agents at once, whose prompts begin alike and grow by turns.

Total tokens/s counts what a client sends and gets: each turn's whole prompt and its answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.bench import Bench
from benchmarks.peers.conversations import Conversations
from benchmarks.peers.driven import DrivenEngine, Spent

NAME, AT_ONCE = "agents_32", 32
WHY_NOT_TRANSFORMERS = (
    "transformers has no batch whose sequences come and go and differ in length, and no cache of "
    "prefixes: one after the other it would take minutes a round"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """In tokens: system prompt and tools, then a user's text, then a tool's result a turn."""

    shared: int
    user: int
    result: int
    turns: int
    answer: int


FULL = Shape(shared=1280, user=100, result=150, turns=3, answer=32)
QUICK = Shape(shared=384, user=32, result=48, turns=2, answer=12)


def add_rows(bench: Bench) -> None:
    if not bench.wants(NAME):
        return
    shape = QUICK if bench.quick else FULL
    rounds = bench.rounds(full=3, quick=1)
    scripts = [_script(bench, shape) for _ in range(rounds)]  # nobody knows a prefix beforehand
    unable = {name: peer for name, peer in bench.peers.items() if name.startswith("transformers")}
    for name in unable:
        bench.leave_out(f"{NAME}/{name}", WHY_NOT_TRANSFORMERS)
    peers = {name: peer for name, peer in bench.peers.items() if name not in unable}

    def ask(engine: DrivenEngine, number: int) -> Spent:
        return engine.agents(*scripts[number], shape.answer)

    measured = bench.measure(ask, rounds=rounds, peers=peers)
    total = Conversations(*scripts[0], shape.answer).total_tokens()
    detail = f"{total} tokens, {shape.turns} turns, {shape.shared} shared"
    bench.add(
        NAME,
        measured,
        tokens=total,
        floor=lambda compute: _floor_s(bench, shape, compute),
        detail=detail,
    )


def _script(bench: Bench, shape: Shape) -> tuple[list[int], list[list[list[int]]]]:
    texts = [
        [bench.prompt(shape.user if turn == 0 else shape.result) for turn in range(shape.turns)]
        for _ in range(AT_ONCE)
    ]
    return bench.prompt(shape.shared), texts


def _floor_s(bench: Bench, shape: Shape, compute: str) -> float:
    """The shared prefix once, each turn's own text, and a step for each token of an answer."""
    took = bench.floor(batch=1, new=shape.shared, context=shape.shared)(compute)
    context = shape.shared
    for turn in range(shape.turns):
        # The last answer's last token comes with the text that follows it.
        new = shape.user if turn == 0 else shape.result + 1
        context += new
        took += bench.floor(batch=AT_ONCE, new=new, context=context, shared=shape.shared)(compute)
        steps = shape.answer - 1
        middle = context + steps // 2
        step = bench.floor(batch=AT_ONCE, new=1, context=middle, shared=shape.shared)(compute)
        took += steps * step
        context += steps
    return took
