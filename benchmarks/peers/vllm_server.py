"""vLLM's own server on this machine's CPU, as a foreign server: started, asked, ended."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from benchmarks.children import end_with_parent, stop
from benchmarks.peers import tcmalloc
from benchmarks.peers.catalogue import Present
from benchmarks.peers.driven import PeerLost

START_LIMIT_S = 900.0
STOP_S = 20.0
PATIENCE_S = "3600"  # a neighbour that is busy is no reason to end


@contextmanager
def serving_vllm(
    found: Present, folder: Path, port: int, log: Path, *flags: str, name: str
) -> Iterator[str]:
    """Its URL, once it answers. Raises PeerLost."""
    allocator = tcmalloc.find(found.folder)
    preloaded = [
        *([allocator] if allocator else []),
        *found.folder.glob("lib/python3*/site-packages/torch/lib/libgomp*"),
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(str(path) for path in preloaded),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": PATIENCE_S,
        "VLLM_ENGINE_ITERATION_TIMEOUT_S": PATIENCE_S,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    # Its script asks for the metadata of a package `vllm`, which `vllm-cpu` has not.
    command = [str(found.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--served-model-name", name, "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        stop(process, STOP_S)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    opener = build_opener(ProxyHandler({}))
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerLost(f"it ended: {log.read_text(errors='replace')[-500:]}")
        try:
            with opener.open(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.5)
    raise PeerLost(f"not ready in {START_LIMIT_S:.0f} s")
