"""A peer's engine in a process of its own, asked over its stdin, each answer with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.children import cpu_s, end_with_parent, stop
from benchmarks.peers.catalogue import Present

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 300.0  # vLLM compiles its first graph meanwhile
CALL_LIMIT_S = 180.0
STOP_PATIENCE_S = 15.0


class PeerLost(Exception):
    """It died, was late or told of a fault: no row of it counts any more."""


class DrivenPeer:
    """Started by its first line; close it in any case."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], log: Path, *, limit_s: float
    ) -> None:
        self._log = log
        # How our threads wait is no setting of theirs.
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
            self.about = str(self._answer(limit_s))
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            request = json.dumps({"call": name, "arguments": arguments})
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerLost(self._last_words()) from None
        return self._answer(CALL_LIMIT_S)

    def _answer(self, limit_s: float) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise PeerLost(f"no answer within {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerLost(self._last_words())
        answer = json.loads(line)
        if "fault" in answer:
            raise PeerLost(answer["fault"])
        return answer["result"]

    def _last_words(self) -> str:
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{ended}{'; ' + lines[-1][:200] if lines else ''}"

    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it is gone with a request unread
                pipe.close()  # the end of its input ends it
        stop(self._process, STOP_PATIENCE_S)

    # --- what a row asks --------------------------------------------------------------------------

    def first_token_s(self, prompt: array[int]) -> float:
        return float(self.call("first_token", prompt.tolist()))

    def start_decoding(self, batch: int, prompt: Callable[[], array[int]]) -> None:
        self.call("start_decoding", [prompt().tolist() for _ in range(batch)])

    def step_s(self, steps: int) -> float:
        return float(median(self.call("steps", steps)))

    def stop_decoding(self) -> None:
        self.call("stop_decoding")

    def keep(self, prompt: array[int]) -> None:
        self.call("keep", prompt.tolist())

    def warm_first_token_s(self) -> float:
        return float(self.call("warm_first_token"))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return [int(token) for token in self.call("greedy", prompt, count)]


def start_llama_cpp(found: Present, model: Path, threads: int, log: Path) -> DrivenPeer:
    """model: the GGUF file as it is."""
    command = [str(found.python), "-m", "benchmarks.peers.llama_cpp_driver"]
    return DrivenPeer([*command, str(model), str(threads)], {}, log, limit_s=START_LIMIT_S)


def start_vllm(found: Present, model: Path, threads: int, log: Path) -> DrivenPeer:
    """model: a folder in Hugging Face's form. Compiled, or eager where that does not start."""
    # vLLM preloads these for its worker processes; here the engine is in the process itself.
    preloaded = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")),
        *found.folder.glob("lib/python3*/site-packages/torch/lib/libgomp*"),
    ]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = {
        "LD_PRELOAD": ":".join(str(path) for path in preloaded),
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 90,000 tokens of this model
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [str(found.python), "-m", "benchmarks.peers.vllm_driver", str(model)]
    try:
        return DrivenPeer(command, environment, log, limit_s=START_LIMIT_S)
    except PeerLost:
        return DrivenPeer([*command, "eager"], environment, log, limit_s=START_LIMIT_S)
