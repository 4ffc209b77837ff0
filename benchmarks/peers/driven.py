"""An engine in a process of its own, asked over its stdin, each answer with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.children import cpu_s, end_with_parent, stop

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 300.0  # vLLM compiles its first graph meanwhile
CALL_LIMIT_S = 300.0  # of a busy machine
STOP_PATIENCE_S = 15.0


class PeerLost(Exception):
    """It died, was late or told of a fault: no row of it counts any more."""


class Spent(NamedTuple):
    """What a piece of work took, by the wall's clock and of all cores together."""

    s: float
    cpu_s: float


class DrivenEngine:
    """Started by its first line; close it in any case."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], log: Path, *, limit_s: float
    ) -> None:
        self._log = log
        # How threads wait is each engine's own setting.
        inherited = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**inherited, "PYTHONPATH": str(ROOT), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            self.about = str(self._answer(limit_s)["result"])
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        return self._ask(name, *arguments)["result"]

    def _ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            request = json.dumps({"call": name, "arguments": arguments})
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerLost(self._last_words()) from None
        return self._answer(CALL_LIMIT_S)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise PeerLost(f"no answer within {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerLost(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "fault" in answer:
            raise PeerLost(answer["fault"])
        return answer

    def _last_words(self) -> str:
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{ended}{'; ' + lines[-1][:200] if lines else ''}"

    def cpu_s(self) -> float:
        """So far, as this machine's clock ticks tell it."""
        return cpu_s(self._process.pid)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it is gone with a request unread
                pipe.close()  # the end of its input ends it
        stop(self._process, STOP_PATIENCE_S)

    # --- what a row asks --------------------------------------------------------------------------

    def spend(self, name: str, *arguments: Any) -> Spent:
        """A call that answers with its seconds."""
        answer = self._ask(name, *arguments)
        return Spent(float(answer["result"]), float(answer["cpu_s"]))

    def first_token(self, prompt: list[int]) -> Spent:
        return self.spend("first_token", prompt)

    def warm_first_token(self) -> Spent:
        return self.spend("warm_first_token")

    def start_decoding(self, prompts: list[list[int]]) -> None:
        self.call("start_decoding", prompts)

    def step(self, count: int) -> Spent:
        """The median of so many steps, and their mean CPU time."""
        answer = self._ask("steps", count)
        return Spent(float(median(answer["result"])), float(answer["cpu_s"]) / count)

    def stop_decoding(self) -> None:
        self.call("stop_decoding")

    def agents(self, shared: list[int], texts: list[list[list[int]]], answer_tokens: int) -> Spent:
        return self.spend("agents", shared, texts, answer_tokens)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return [int(token) for token in self.call("greedy", prompt, count)]

    def logits(self, tokens: list[int], path: Path) -> None:
        self.call("logits", tokens, str(path))

    def memory(self) -> dict[str, float]:
        memory: dict[str, float] = self.call("memory")
        return memory
