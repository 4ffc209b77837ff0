"""A runner whose "KV" is a hash of the whole history, kept in pages: mix-ups change tokens.

Each slot of the arena holds the state after its token; a row's first state is read back through its
page table. Newly assigned pages are full of poison, so reading what nobody wrote is caught, and so
is writing other bytes over a slot that has some. A token's log probability is read from the state
before it, so one of another place or history shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from engine.schedule.plan import Row, StepPlan, StepResult
from policies.contract.wire import TokenLogprob

VOCAB = 50
EMPTY = 0
POISON = -1
START = 17


def mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % ((1 << 61) - 1) or 1


def fold(tokens: Iterable[int], state: int = START) -> int:
    for token in tokens:
        state = mix(state, token)
    return state


def choose(state: int, seed: int = 0) -> int:
    return ((state >> 7) + seed) % VOCAB


def likelihood(state: int, token: int, top: int) -> TokenLogprob:
    """Of a token after this state. top: so many entries."""
    alternatives = tuple((choose(state, at), -float(at)) for at in range(top))
    return TokenLogprob(-float(state % 1009), 1 + token, alternatives)


def alone(prompt: array[int], count: int, seed: int = 0) -> list[int]:
    """What an unconstrained fresh run produces."""
    state, tokens = fold(prompt), []
    for _ in range(count):
        tokens.append(choose(state, seed))
        state = mix(state, tokens[-1])
    return tokens


class ArenaRunner:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.arena = [[POISON] * page_size for _ in range(num_pages)]
        self.tags = [0] * num_pages
        self.not_due: set[int] = set()  # sequence ids that get None where they sample
        self.sick: set[int] = set()  # sequence ids whose logits are not finite
        self.live: set[int] = set()
        self.plans: list[StepPlan] = []
        self._lost: set[int] = set()  # sequence ids of the last step's failed rows

    def begin(self, sequence_id: int, prompt: array[int]) -> None:
        self.live.add(sequence_id)

    def end(self, sequence_id: int) -> None:
        self.live.remove(sequence_id)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for page, generation in plan.assigned:
            self.tags[page] = generation
            self.arena[page] = [POISON] * self.page_size
        corrupt, insane = set(), set()
        for copy in plan.copies:
            if self.tags[copy.source] != copy.generation:
                corrupt.add(copy.row)
            assert self.tags[copy.target] == plan.rows[copy.row].generations[0][-1]
            self.arena[copy.target] = list(self.arena[copy.source])
        tokens: list[int | None] = []
        logprobs: dict[int, TokenLogprob] = {}
        told: dict[int, tuple[TokenLogprob, ...]] = {}
        for index, row in enumerate(plan.rows):
            (pages,), (generations,) = row.page_table, row.generations
            end = row.start + len(row.token_ids)
            if (
                plan.follows and row.sequence_id in self._lost
            ):  # in vain: what it follows is not there
                tokens.append(0)
                continue
            assert (len(pages) - 1) * self.page_size < end <= len(pages) * self.page_size
            if index in corrupt or [self.tags[page] for page in pages] != generations:
                corrupt.add(index)
                tokens.append(None)
                continue
            state = START if row.start == 0 else self._read(pages, row.start - 1)
            for position, token in enumerate(row.token_ids, row.start):
                state = mix(state, token)
                self._write(pages, position, state)
            if row.prompt_logprobs is not None:
                told[index] = tuple(self._told(row, position) for position in row.prompt_logprobs)
            if row.samples and row.sequence_id in self.sick:
                insane.add(index)
            if row.samples and row.sequence_id not in self.not_due | self.sick:
                token = choose(state, row.sampling.seed)
                tokens.append(token)
                if row.sampling.logprobs is not None:
                    logprobs[index] = likelihood(state, token, row.sampling.logprobs)
            else:
                tokens.append(None)
        for page, offset in plan.zero_tails:
            self.arena[page][offset:] = [EMPTY] * (self.page_size - offset)
        lost = self._lost if plan.follows else set()
        self._lost = {
            row.sequence_id for at, row in enumerate(plan.rows) if at in corrupt | insane
        } | lost
        for row in plan.rows:
            if row.sequence_id not in self._lost:
                end = row.start + len(row.token_ids)
                tail = self.arena[row.page_table[0][-1]][(end - 1) % self.page_size + 1 :]
                assert POISON not in tail, "a masked lane would read poison"
        return StepResult(
            plan.step,
            tuple(tokens),
            tuple(sorted(corrupt)),
            logprobs=logprobs,
            prompt_logprobs=told,
            insane=tuple(sorted(insane)),
        )

    def _told(self, row: Row, position: int) -> TokenLogprob:
        assert row.start < position <= row.start + len(row.token_ids), "not from this row's logits"
        assert row.history is not None
        assert row.sampling.prompt_logprobs is not None
        state = self._read(row.page_table[0], position - 1)
        return likelihood(state, row.history[position], row.sampling.prompt_logprobs)

    def _read(self, pages: list[int], position: int) -> int:
        state = self.arena[pages[position // self.page_size]][position % self.page_size]
        assert state not in (EMPTY, POISON), f"position {position} was never computed"
        return state

    def _write(self, pages: list[int], position: int, state: int) -> None:
        page = self.arena[pages[position // self.page_size]]
        old = page[position % self.page_size]
        assert old in (EMPTY, POISON, state), f"position {position} overwrites other bytes"
        page[position % self.page_size] = state


class AheadArenaRunner(ArenaRunner):
    """Computes when a step is launched or, if lazy, when it is collected: a real one in between."""

    runs_ahead = True

    def __init__(self, num_pages: int, page_size: int, *, lazy: bool) -> None:
        super().__init__(num_pages, page_size)
        self._lazy = lazy
        self._launched: StepPlan | StepResult | None = None

    def launch(self, plan: StepPlan) -> None:
        assert self._launched is None, "launched before the last step was collected"
        self._launched = plan if self._lazy else self.execute(plan)

    def collect(self, following: StepPlan | None) -> StepResult:
        launched, self._launched = self._launched, None
        assert launched is not None
        result = launched if isinstance(launched, StepResult) else self.execute(launched)
        if following is not None:
            following.follow(result.tokens)
            self.launch(following)
        return result
