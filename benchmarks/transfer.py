"""Pages from one engine's process to another's, each way, beside a plain socket and a plain copy.

`python -m benchmarks.transfer [--quick] [--json FILE] [--pages N]`. Each side is a process with a
mover; the time is from the order to send all pages to the news that the peer has verified them. The
peers are a socket between two processes that carries the same pages unproven, and numpy's copy of
them within one. All alternate; figures are medians, ratios medians of ratios. Mooncake's engine
listens on every address and asks nobody who they are, so it is measured by root alone, in a network
of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import median

from benchmarks.beside import Beside, Figure, absent_rows
from benchmarks.children import end_with_parent, leave_by_exit_on_terminate, stop
from benchmarks.mooncake import Network
from benchmarks.store import Pages
from engine.schedule.transfer_orders import (
    Accepted,
    Export,
    HandedOver,
    HandOver,
    Import,
    Send,
    TransferFailed,
    TransferNews,
    TransferQuiet,
)
from engine.store.page_codec import PageLayout, copy_bytes
from engine.transfer.mover import TransferMover
from engine.transfer.rooms import WAYS

LAYOUT = PageLayout("bf16", num_layers=32, num_kv_heads=3, page_size=64, head_dim=64)
DEADLINE_S = 60.0
PATIENCE_S = 10.0
_POLL_S = 0.0002
_SOCKET_BYTES = 4 << 20


class Memory:
    """A PageMemory of what is sent and of where it goes."""

    page_bytes = LAYOUT.page_bytes

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views

    def generation(self, page_id: int) -> int:
        return 1

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        """Tags are another's."""

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview]:
        return [self.views[page] for page in page_ids]

    incoming = outgoing

    def arrive(self, page_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        """The views are the pages."""

    def free(self, views: Sequence[memoryview]) -> None:
        """Nothing was borrowed."""


def keys_of(count: int) -> tuple[bytes, ...]:
    return tuple(sha256(b"%d" % at).digest() for at in range(count))


class Ends:
    """News of one mover, waited for."""

    def __init__(self, mover: TransferMover) -> None:
        self._mover = mover

    def wait(self, kind: type[TransferNews], transfer_id: bytes) -> None:
        """Raises RuntimeError where the transfer fails, or nothing comes."""
        deadline = time.perf_counter() + DEADLINE_S
        while time.perf_counter() < deadline:
            for news in self._mover.take():
                if isinstance(news, TransferFailed):
                    raise RuntimeError(f"a transfer failed: {news.code}: {news.message}")
                if isinstance(news, kind) and news.transfer_id == transfer_id:
                    return
            time.sleep(_POLL_S)
        raise RuntimeError(f"no {kind.__name__} came")


# --- the receiver's process ---------------------------------------------------------------------


def receive(way: str, num_pages: int) -> None:
    """Says where it listens, the mover and a plain socket; then takes a transfer for each line."""
    pages = Pages(LAYOUT, num_pages)
    mover = TransferMover(Memory(pages.targets), LAYOUT, listen=("127.0.0.1", 0), ways=WAYS[way])
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=take_plain, args=(plain, pages.targets), daemon=True).start()
    print(mover.address, f"127.0.0.1:{plain.getsockname()[1]}", flush=True)
    ends = Ends(mover)
    for line in sys.stdin:
        transfer_id, secret = map(bytes.fromhex, line.split())
        mover.give(
            [
                Import(
                    transfer_id,
                    secret,
                    keys_of(num_pages),
                    num_pages * LAYOUT.page_size,
                    0,
                    tuple(range(num_pages)),
                    (1,) * num_pages,
                    time.monotonic() + DEADLINE_S,
                )
            ]
        )
        print("ready", flush=True)
        ends.wait(TransferQuiet, transfer_id)
    mover.close(1.0)


def take_plain(server: socket.socket, targets: list[memoryview]) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            for target in targets:
                at = 0
                while at < len(target):
                    at += connection.recv_into(target[at:])
            connection.sendall(b"\0")


@contextmanager
def receiver(way: str, num_pages: int) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.transfer"),
            *("--receive", way, "--pages", str(num_pages)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        yield child
    finally:
        stop(child, PATIENCE_S)
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            stream.close()


# --- the sender's -------------------------------------------------------------------------------


class Sender:
    """This process's end of one way."""

    def __init__(self, way: str, pages: Pages, child: subprocess.Popen[str]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self.way = way
        self._pages = pages
        self._say, self._hear = child.stdin, child.stdout
        self._peer, self.plain = self._hear.readline().split()
        self._mover = TransferMover(Memory(pages.sources), LAYOUT, listen=None, ways=WAYS[way])
        self._ends = Ends(self._mover)

    def transfer(self) -> tuple[float, float]:
        """Seconds until the peer has accepted, and from then on until it has all."""
        transfer_id, secret = os.urandom(16), os.urandom(32)
        self._say.write(f"{transfer_id.hex()} {secret.hex()}\n")
        self._say.flush()
        assert self._hear.readline() == "ready\n"
        count = self._pages.count
        tokens, deadline = count * LAYOUT.page_size, time.monotonic() + DEADLINE_S
        began = time.perf_counter()
        self._mover.give(
            [Export(transfer_id, secret, self._peer, keys_of(count), tokens, deadline)]
        )
        self._ends.wait(Accepted, transfer_id)
        accepted = time.perf_counter()
        self._mover.give(
            [
                Send(transfer_id, 0, tuple(range(count)), (1,) * count),
                HandOver(transfer_id, (), (), None),
            ]
        )
        self._ends.wait(HandedOver, transfer_id)
        return accepted - began, time.perf_counter() - accepted

    def plain_s(self) -> float:
        """Of the same pages over a socket, without anything else."""
        host, _, port = self.plain.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            began = time.perf_counter()
            for page in self._pages.sources:
                connection.sendall(page)
            connection.recv(1)
            return time.perf_counter() - began

    def connect_s(self) -> float:
        host, _, port = self.plain.rpartition(":")
        began = time.perf_counter()
        socket.create_connection((host, int(port))).close()
        return time.perf_counter() - began

    def close(self) -> None:
        self._mover.close(1.0)


def rows_of(sender: Sender, pages: Pages, rounds: int) -> Iterator[Beside]:
    total = pages.count * LAYOUT.page_bytes / 1e9
    figures: list[tuple[float, float, float, float]] = []
    for turn in range(rounds + 1):
        setup_s, ours_s = sender.transfer()
        plain_s = sender.plain_s()
        copy = pages.gigabytes_per_s(lambda at: copy_bytes(pages.sources[at], pages.targets[at]), 1)
        if turn:  # the first touches memory that was never used
            figures.append((total / ours_s, total / plain_s, copy, setup_s))
    yield Beside(
        f"transfer_{sender.way}",
        median(ours for ours, *_ in figures),
        "GB/s",
        more_is_better=True,
        peers={
            "plain socket": Figure(
                median(plain for _, plain, *_ in figures),
                median(ours / plain for ours, plain, *_ in figures),
            ),
            "copy": Figure(
                median(copy for _, _, copy, _ in figures),
                median(ours / copy for ours, _, copy, _ in figures),
            ),
        },
        detail=f"{pages.count} pages of {LAYOUT.page_bytes / 1e6:.2f} MB",
    )
    setup_ms = median(setup for *_, setup in figures) * 1e3
    yield Beside(
        f"setup_{sender.way}",
        setup_ms,
        "ms",
        more_is_better=False,
        peers={},
        detail="connect, prove the secret, offer, accept, make a room",
    )


def measure(
    num_pages: int, rounds: int, ways: Sequence[str] = ("tcp", "auto", "mooncake")
) -> Iterator[Beside | dict[str, str]]:
    """A mapping of names to reasons: what could not be measured."""
    pages = Pages(LAYOUT, num_pages)
    for way in ways:
        with ExitStack() as stack:
            if way == "mooncake":
                try:
                    stack.enter_context(Network().inside())
                except PermissionError as error:
                    yield {"transfer_mooncake": str(error)}
                    continue
            child = stack.enter_context(receiver(way, num_pages))
            sender = Sender(way, pages, child)
            stack.callback(sender.close)
            yield from rows_of(sender, pages, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--pages", type=int, default=64, help="of a transfer")
    parser.add_argument("--receive", choices=sorted(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    leave_by_exit_on_terminate()
    if options.receive:
        receive(options.receive, options.pages)
        return
    rows: list[dict[str, object]] = []
    for row in measure(options.pages, rounds=5 if options.quick else 25):
        if isinstance(row, Beside):
            print(row, flush=True)
            rows += row.rows()
        else:
            rows += absent_rows(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
