"""An engine without a model: the real scheduler and pages, but the tokens come from a script.

The script is a JSON array, tried in order: {"if": regular expression, searched in the whole
rendered prompt with special tokens as text, "say": text, "delay_ms": before each token (optional),
"die_after": tokens, then the process exits (optional)}. `…` answers what nothing matches.
A scripted token is certain, and so is a given prompt: log probability 0, rank 1, no alternatives.
Lanes of one request say the same; penalties and bias change nothing.
"""

from __future__ import annotations

import math
import os
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from engine.config import ConfigError
from engine.schedule.plan import Row, StepPlan, StepResult
from engine.script_pages import ScriptPages
from policies.contract.bundle import Bundle
from policies.contract.wire import TokenLogprob

EXIT_DIED = 70

_OTHERWISE = "…"
# Streams fall due together on this grid, as a real engine's batch does; else 64 streams of 200
# tokens/s would be 12 800 steps a second instead of 200.
_GRID_S = 0.005
_EARLY_S = 0.0005  # due so soon counts as due
_NAP_S = 0.005  # never asleep longer, so that an abort or a submit is heard


class ScriptRule(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the script's array."""

    pattern: str = msgspec.field(name="if")
    say: str
    delay_ms: float = 0.0
    die_after: int | None = None


@dataclass(frozen=True, slots=True)
class _Reply:
    pattern: re.Pattern[str]
    token_ids: tuple[int, ...]  # with the stop token at the end
    delay_s: float
    die_after: int | None


@dataclass(slots=True)
class _Speaker:
    reply: _Reply
    position: int = -1  # the completion token that due_at is for
    due_at: float = 0.0


def read_script(data: bytes, *, name: str = "--script") -> tuple[ScriptRule, ...]:
    """Raises ConfigError naming the entry and field at fault."""
    try:
        rules = msgspec.json.decode(data, type=tuple[ScriptRule, ...])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            name,
            found=str(error),
            allowed='a JSON array of {"if", "say", "delay_ms"?, "die_after"?}',
            remedy="mend that entry",
        ) from error
    for index, rule in enumerate(rules):
        try:
            re.compile(rule.pattern)
        except re.error as error:
            raise ConfigError(
                f"{name}[{index}].if",
                found=f"{rule.pattern!r} ({error})",
                allowed="a Python regular expression",
                remedy="mend the pattern",
            ) from error
        if not 0.0 <= rule.delay_ms < math.inf:
            raise ConfigError(
                f"{name}[{index}].delay_ms",
                found=rule.delay_ms,
                allowed="milliseconds, 0 or more",
                remedy="leave it out for no delay",
            )
        if rule.die_after is not None and rule.die_after < 0:
            raise ConfigError(
                f"{name}[{index}].die_after",
                found=rule.die_after,
                allowed="a number of tokens, 0 or more",
                remedy="leave it out to live on",
            )
    return rules


def _certain(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(0.0, 1, ((token, 0.0),) if top else ())


class ScriptRunner:
    """A Runner (engine/schedule/plan.py). What it says at a position depends on the prompt alone.

    pages: whose tags it writes, if they go to other engines. Raises ConfigError if the bundle has
    no stop token.
    """

    def __init__(
        self,
        rules: tuple[ScriptRule, ...],
        bundle: Bundle,
        *,
        pages: ScriptPages | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        if not bundle.stop_token_ids:
            raise ConfigError(
                "--bundle",
                found="no stop_token_ids",
                allowed="one or more",
                remedy="a scripted reply ends with the first of them",
            )
        self._tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
        self._stop_id = bundle.stop_token_ids[0]
        self._pages = pages
        self._clock = clock
        self._sleep = sleep
        self._exit = exit_process
        rules = (*rules, ScriptRule(pattern="", say=_OTHERWISE))
        self._replies = [self._reply(rule) for rule in rules]
        self._speakers: dict[int, _Speaker] = {}

    @classmethod
    def load(cls, script: str, bundle: Bundle, pages: ScriptPages | None = None) -> ScriptRunner:
        """Read the script file. Raises ConfigError when it is absent or wrong."""
        try:
            data = Path(script).read_bytes()
        except OSError as error:
            raise ConfigError(
                "--script", found=str(error), allowed="a readable file", remedy="check the path"
            ) from error
        return cls(read_script(data, name=script), bundle, pages=pages)

    def begin(self, sequence_id: int, prompt: array[int]) -> None:
        """Choose the reply; token ids → the rendered prompt, special tokens included."""
        text: str = self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        reply = next(reply for reply in self._replies if reply.pattern.search(text))
        self._speakers[sequence_id] = _Speaker(reply)

    def end(self, sequence_id: int) -> None:
        self._speakers.pop(sequence_id, None)

    def execute(self, plan: StepPlan) -> StepResult:
        """Say what is due; nap until the earliest due row if nothing is, and nothing else was done.

        A row that samples but is not due gets None: it is planned again.
        """
        if self._pages is not None:
            self._pages.assign(plan.assigned)
        started_at = now = self._clock()
        due_at = [self._due_at(row, now) for row in plan.rows if row.samples]
        if len(due_at) == len(plan.rows):
            wait_s = min(due_at) - now
            if wait_s > _EARLY_S:
                self._sleep(min(wait_s, _NAP_S))
                now = self._clock()
        tokens = tuple(self._say(row, now) if row.samples else None for row in plan.rows)
        logprobs: dict[int, TokenLogprob] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        for index, (row, token) in enumerate(zip(plan.rows, tokens, strict=True)):
            if token is not None and row.sampling.logprobs is not None:
                logprobs[index] = _certain(token, row.sampling.logprobs)
            if row.prompt_logprobs is not None:
                assert row.history is not None
                assert row.sampling.prompt_logprobs is not None
                told = row.history[row.prompt_logprobs.start : row.prompt_logprobs.stop]
                top = row.sampling.prompt_logprobs
                prompt_logprobs[index] = tuple(_certain(given, top) for given in told)
        return StepResult(
            plan.step,
            tokens,
            compute_s=self._clock() - started_at,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _due_at(self, row: Row, now: float) -> float:
        """When this row's next token is due; the delay begins when it is first asked for."""
        speaker = self._speakers[row.sequence_id]
        if speaker.position != row.num_completion:
            delay_s = speaker.reply.delay_s
            if speaker.position == row.num_completion - 1 and row.num_completion:
                # From when the last one was due, so that the pace does not drift.
                speaker.due_at = max(speaker.due_at, now - delay_s) + delay_s
            elif delay_s:
                grid_s = min(delay_s, _GRID_S)
                speaker.due_at = math.ceil((now + delay_s) / grid_s) * grid_s
            speaker.position = row.num_completion
        return speaker.due_at

    def _say(self, row: Row, now: float) -> int | None:
        speaker = self._speakers[row.sequence_id]
        if speaker.due_at > now + _EARLY_S:
            return None
        reply, position = speaker.reply, row.num_completion
        if reply.die_after is not None and position >= reply.die_after:
            self._exit(EXIT_DIED)
        return reply.token_ids[position] if position < len(reply.token_ids) else self._stop_id

    def _reply(self, rule: ScriptRule) -> _Reply:
        ids = self._tokenizer.encode(rule.say, add_special_tokens=False).ids
        return _Reply(
            re.compile(rule.pattern),
            (*ids, self._stop_id),
            rule.delay_ms / 1000.0,
            rule.die_after,
        )
