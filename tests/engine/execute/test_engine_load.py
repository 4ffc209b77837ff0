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


def test_its_log_says_why_torch_serves_alone(tiny_folder: Any) -> None:
    spec = {"name": "m", "identity": "m", "path": str(tiny_folder()), "format": "safetensors"}
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    with ours, theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "engine", "serve", "--fd", str(theirs.fileno())),
                *("--engine-index", "0", "--model-spec", json.dumps(spec), "--compute", "fast"),
                *("--threads", "1", "--kv-device-tokens", "1024"),
            ],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            env={**os.environ, "KAGARI_CPU_ISA": "off"},
        )
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
