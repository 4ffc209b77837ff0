"""An engine process of the tests with a disk tier: it knows no model, only pins, purges, a drain.

    python tiered_engine.py FILE … --engine-index N --fd FD

What comes is told in FILE, a line each.
"""

from __future__ import annotations

import argparse
import signal
import socket
from pathlib import Path

from engine.framing import AGENT_CHANNEL, FrameReader, frame
from policies.contract import wire

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--engine-index", type=int, required=True)
parser.add_argument("--fd", type=int, required=True)
options, _ = parser.parse_known_args()

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of its socket ends it
sock = socket.socket(fileno=options.fd)
index = options.engine_index


def send(message: object) -> None:
    sock.sendall(frame(AGENT_CHANNEL, wire.encode(message)))


disk = wire.TierReport("disk", 100, 8, stored_pages=8, fetch_bytes_per_s=1e9)
info = wire.EngineInfo(
    index, "m", "i", 100, 16, 8, "b", "t", "l", "w", "bf16", "bf16", "exact", 64,
    page_bytes=4096, tier_pages=(("disk", 100),),
)  # fmt: skip
send(wire.EngineUp(info, 0.1))
send(
    wire.EngineNews(
        wire.EngineReport(index, "ready", tiers=(disk,), pages_pinned=2, integrity_faults=1), 0, []
    )
)
reader = FrameReader()
while data := sock.recv(1 << 16):
    for channel, encoded in reader.feed(data):
        message = wire.decode_from_agent(encoded)
        with options.file.open("a") as file:
            file.write(f"{channel} {type(message).__name__}\n")
        match message:
            case wire.Pin(pin_id=pin_id):
                send(wire.PinResult(index, pin_id, len(message.prompt) // 4 // 16))
            case wire.Purge(purge_id=purge_id):
                send(wire.PurgeResult(index, purge_id, 3))
