"""An engine process over a real checkpoint, small as it is: how it starts and what it says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.framing import FrameReader
from policies.contract import wire

ROOT = Path(__file__).resolve().parents[3]


def start(theirs: socket.socket, folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    spec = {"name": "m", "identity": "m", "path": str(folder), "format": "safetensors"}
    command = (sys.executable, "-m", "engine", "serve", "--fd", str(theirs.fileno()))
    rest = ("--engine-index", "0", "--model-spec", json.dumps(spec), "--threads", "1")
    return subprocess.Popen(
        [*command, *rest, *flags],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        env={**os.environ, "KAGARI_CPU_ISA": "off"},
    )


def test_its_log_says_why_torch_serves_alone_and_what_fits(tiny_folder: Any) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    with ours, theirs:
        flags = ("--compute", "fast", "--kv-dtype", "int8", "--kv-device-tokens", "1024")
        process = start(theirs, tiny_folder(), *flags)
        theirs.close()
        try:
            reader = FrameReader()
            while not (frames := list(reader.feed(ours.recv(1 << 16)))):
                pass
            up = wire.decode_from_engine(frames[0][1])
            ours.close()
            _, told = process.communicate(timeout=20)
        finally:
            process.kill()
            process.wait()
    assert isinstance(up, wire.EngineUp)
    assert (up.info.compute, up.info.identity) == ("fast", "m+fast")  # as asked, and so announced
    assert "torch computes every op, which is slower: KAGARI_CPU_ISA is off" in told.decode()
    assert process.returncode == 0
    lines = [json.loads(line) for line in told.splitlines() if line.startswith(b"{")]
    (capacity,) = (line for line in lines if line["event"] == "engine_capacity")
    assert capacity.pop("available_bytes") > 0
    assert up.info.page_bytes > 0
    host, _, port = up.info.peer.rpartition(":")
    assert (host, port.isdecimal()) == ("127.0.0.1", True), "it takes part in splits"
    assert capacity == {
        "event": "engine_capacity",
        "kv_dtype": "int8",
        "tokens": 1024,
        "pages": 16,
        "page_bytes": up.info.page_bytes,
        "bytes": 16 * up.info.page_bytes,
    }
    (found,) = (line for line in lines if line["event"] == "engine_kv_self_test")
    assert found["kv_dtype"] == up.info.kv_precision == "int8"
    assert 0 <= found["divergence"] < found["bound"]


def test_a_pool_that_memory_does_not_hold_ends_the_start(tiny_folder: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start(theirs, tiny_folder(), "--kv-device-tokens", str(10**13))
        try:
            _, told = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 4
    assert f"engine: --kv-device-tokens: found {10**13} tokens in bf16 pages" in told.decode()
