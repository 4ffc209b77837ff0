"""Starts each peer with the settings that serve it best on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.children import end_with_parent
from benchmarks.peers import tcmalloc
from benchmarks.peers.catalogue import Present
from benchmarks.peers.driven import ROOT, START_LIMIT_S, DrivenEngine, PeerLost

QUANTIZE_LIMIT_S = 300.0


def start_here(
    module: str, *arguments: object, log: Path, environment: Mapping[str, str]
) -> DrivenEngine:
    """A driver in the environment of this benchmark."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return DrivenEngine(command, environment, log, limit_s=START_LIMIT_S)


def start_transformers(model: Path, dtype: str, threads: int, log: Path) -> DrivenEngine:
    """dtype: fp32 or bf16."""
    module = "benchmarks.peers.transformers_driver"
    return start_here(module, model, dtype, threads, log=log, environment={})


def start_llama_cpp(found: Present, model: Path, threads: int, log: Path) -> DrivenEngine:
    """model: a GGUF file, as it is."""
    command = [str(found.python), "-m", "benchmarks.peers.llama_cpp_driver"]
    return DrivenEngine([*command, str(model), str(threads)], {}, log, limit_s=START_LIMIT_S)


def requantized(found: Present, model: Path, target: Path, threads: int) -> Path:
    """The file in Q8_0, made once by llama.cpp itself. Raises PeerLost."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [str(found.python), "-m", "benchmarks.peers.llama_cpp_quantize"]
    try:
        subprocess.run(
            [*command, str(model), str(target), str(threads)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=QUANTIZE_LIMIT_S,
            check=True,
            preexec_fn=end_with_parent,
        )
    except subprocess.TimeoutExpired:
        raise PeerLost(f"not requantised within {QUANTIZE_LIMIT_S:.0f} s") from None
    except subprocess.CalledProcessError as failed:
        words = failed.stderr.strip().splitlines()[-1:] or [f"exit status {failed.returncode}"]
        raise PeerLost(f"not requantised: {words[0][:200]}") from None
    return target


def start_vllm(found: Present, model: Path, dtype: str, threads: int, log: Path) -> DrivenEngine:
    """model: a folder in Hugging Face's form. Compiled, or eager where that does not start."""
    # vLLM preloads these for its worker processes; here the engine is in the process itself.
    allocator = tcmalloc.find(found.folder)
    preloaded = [
        *([allocator] if allocator else []),
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
    command = [str(found.python), "-m", "benchmarks.peers.vllm_driver", str(model), dtype]
    try:
        peer = DrivenEngine(command, environment, log, limit_s=START_LIMIT_S)
    except PeerLost:
        peer = DrivenEngine([*command, "eager"], environment, log, limit_s=START_LIMIT_S)
    peer.about += ", tcmalloc" if allocator else f", without tcmalloc ({tcmalloc.REMEDY})"
    return peer
