"""Host and disk tier beside the same copies, reads and writes without keys, headers and checksums.

`python -m benchmarks.store [--quick] [--json FILE] [--folder DIR]`. The peer is what the machine
gives: numpy's copy between two arenas, one pwritev or preadv a page on a preallocated file, direct
where the file system can. Both sides alternate; figures are medians, ratios medians of ratios. A
caller is a thread that has one page under way. The scan's peer is the 60 µs a slot that were
measured for a prototype; the checksum's is a copy of the same page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.beside import Beside, Figure
from benchmarks.children import leave_by_exit_on_terminate
from engine.store.block_file import BlockFile, aligned
from engine.store.host import HostTier
from engine.store.page_codec import PageLayout, copy_bytes, payload_checksum
from engine.store.slot_file import SlotFileTier
from engine.store.tier import PageRecord, Status, Tier

NEVER = 1e12  # a deadline
OWNER, ROOT = bytes(16), bytes(32)
SLOT_US = 60.0
LAYOUTS = {
    "256k": PageLayout("bf16", num_layers=8, num_kv_heads=2, page_size=64, head_dim=64),
    "1.5m": PageLayout("bf16", num_layers=32, num_kv_heads=3, page_size=64, head_dim=64),
    "4m": PageLayout("bf16", num_layers=32, num_kv_heads=8, page_size=64, head_dim=64),
}
CALLERS = (1, 4)
Act = Callable[[int], None]  # what is done for page n


class Pages:
    """Payloads and where they come back to: memory as aligned as an arena's."""

    def __init__(self, layout: PageLayout, count: int) -> None:
        self.layout, self.count = layout, count
        size = layout.page_bytes
        self.memory, self.back = aligned(count * size), aligned(count * size)
        chance = np.random.default_rng(0)
        np.frombuffer(self.memory, np.uint8)[:] = chance.integers(0, 256, count * size, np.uint8)
        copy_bytes(self.memory, self.back)
        self.sources = [self.memory[at * size : (at + 1) * size] for at in range(count)]
        self.targets = [self.back[at * size : (at + 1) * size] for at in range(count)]
        self.records = [
            PageRecord(sha256(b"%d" % at).digest(), ROOT, at, OWNER, 1) for at in range(count)
        ]

    def gigabytes_per_s(self, act: Act, callers: int) -> float:
        parts = [range(start, self.count, callers) for start in range(callers)]

        def work(part: range) -> None:
            for at in part:
                act(at)

        threads = [threading.Thread(target=work, args=(part,)) for part in parts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.count * self.layout.page_bytes / (time.perf_counter() - began) / 1e9


def acts_of(tier: Tier, pages: Pages) -> tuple[Act, Act]:
    """put and get of a page. Raises RuntimeError where one does not go well."""

    def put(at: int) -> None:
        expect_ok(tier.put([pages.records[at]], [pages.sources[at]], NEVER))

    def get(at: int) -> None:
        expect_ok(tier.get([pages.records[at].key], [pages.targets[at]], NEVER))

    return put, get


def expect_ok(statuses: list[Status]) -> None:
    if statuses != [Status.OK]:
        raise RuntimeError(f"a page was not served: {statuses}")


def rows_of(
    name: str, pages: Pages, tier: Tier, *, peer: tuple[Act, Act], peer_name: str, rounds: int
) -> Iterator[Beside]:
    ours = acts_of(tier, pages)
    keys = [record.key for record in pages.records]
    for callers in CALLERS:
        figures: dict[str, list[tuple[float, float]]] = {"put": [], "get": []}
        for turn in range(rounds + 1):
            tier.remove(keys, NEVER)
            for verb, mine, plain in zip(figures, ours, peer, strict=True):
                pair = pages.gigabytes_per_s(mine, callers), pages.gigabytes_per_s(plain, callers)
                if turn:  # the first touches memory that was never used
                    figures[verb].append(pair)
        for verb, pairs in figures.items():
            figure = Figure(median(b for _, b in pairs), median(a / b for a, b in pairs))
            yield Beside(
                f"{name}_{verb}_x{callers}",
                median(a for a, _ in pairs),
                "GB/s",
                more_is_better=True,
                peers={peer_name: figure},
                detail=f"{pages.count} pages, {callers} callers",
            )


def host_rows(name: str, pages: Pages, rounds: int) -> Iterator[Beside]:
    size = pages.layout.page_bytes
    other = aligned(pages.count * size)
    slots = [other[at * size : (at + 1) * size] for at in range(pages.count)]
    peer: tuple[Act, Act] = (
        lambda at: copy_bytes(pages.sources[at], slots[at]),
        lambda at: copy_bytes(slots[at], pages.targets[at]),
    )
    tier = HostTier(pages.layout, pages.count)
    yield from rows_of(f"host_{name}", pages, tier, peer=peer, peer_name="copy", rounds=rounds)
    tier.close()


def disk_rows(name: str, pages: Pages, folder: Path, rounds: int) -> Iterator[Beside]:
    size = pages.layout.page_bytes
    with in_folder(folder) as ours, in_folder(folder) as theirs:
        tier = SlotFileTier(ours, pages.layout, pages.count)
        plain = BlockFile(theirs / "plain", pages.count * size)
        peer: tuple[Act, Act] = (
            lambda at: check_size(plain.write(at * size, [pages.sources[at]]), size),
            lambda at: check_size(plain.read(at * size, [pages.targets[at]]), size),
        )
        how = "direct" if tier.is_direct else "page cache"
        yield from rows_of(
            f"disk_{name}", pages, tier, peer=peer, peer_name=f"plain file, {how}", rounds=rounds
        )
        plain.close()
        tier.close()


def check_size(done: int, size: int) -> None:
    if done != size:
        raise RuntimeError(f"{done} bytes of {size} were read or written")


def scan_row(folder: Path, count: int, rounds: int) -> Beside:
    """Of slots that are all written: headers of empty ones cost a disk less."""
    pages = Pages(LAYOUTS["256k"], 16)
    with in_folder(folder) as ours:
        tier = SlotFileTier(ours, pages.layout, count)
        for at in range(count):
            record = PageRecord(sha256(b"%d" % at).digest(), ROOT, at, OWNER, 1)
            expect_ok(tier.put([record], [pages.sources[at % 16]], NEVER))
        tier.close()
        took: list[float] = []
        for _ in range(rounds):
            began = time.perf_counter()
            tier = SlotFileTier(ours, pages.layout, count)
            took.append((time.perf_counter() - began) / count * 1e6)
            found = len(tier.records())
            tier.close()
            if found != count:
                raise RuntimeError(f"{found} pages of {count} were found again")
    us = median(took)
    return Beside(
        "disk_scan",
        us,
        "µs a slot",
        more_is_better=False,
        peers={"prototype": Figure(SLOT_US, SLOT_US / us)},
        detail=f"{count} slots, all written; a start with its two syncs",
    )


def checksum_row(name: str, pages: Pages, rounds: int) -> Beside:
    """Of pages in turn, as a get meets them, and so mostly not in a cache."""
    pairs: list[tuple[float, float]] = []
    for _ in range(rounds):
        rate = pages.gigabytes_per_s(lambda at: _ignore(payload_checksum(pages.sources[at])), 1)
        copy = pages.gigabytes_per_s(lambda at: copy_bytes(pages.sources[at], pages.targets[at]), 1)
        pairs.append((pages.layout.page_bytes / rate / 1e3, pages.layout.page_bytes / copy / 1e3))
    figure = Figure(median(b for _, b in pairs), median(b / a for a, b in pairs))
    return Beside(
        f"checksum_{name}",
        median(a for a, _ in pairs),
        "µs a page",
        more_is_better=False,
        peers={"copy": figure},
    )


def _ignore(_: bytes) -> None:
    return None


@contextmanager
def in_folder(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)


def measure(folder: Path, *, rounds: int, total_bytes: int, slots: int) -> Iterator[Beside]:
    """total_bytes: copied, written or read in each measure. slots: of the scanned file."""
    for name, layout in LAYOUTS.items():
        pages = Pages(layout, total_bytes // layout.page_bytes)
        yield checksum_row(name, pages, rounds)
        yield from host_rows(name, pages, rounds)
        yield from disk_rows(name, pages, folder, rounds)
    yield scan_row(folder, slots, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="less memory, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    options = parser.parse_args()
    leave_by_exit_on_terminate()
    rows: list[dict[str, object]] = []
    rounds, total_bytes, slots = (3, 96 << 20, 400) if options.quick else (9, 384 << 20, 4000)
    for row in measure(options.folder, rounds=rounds, total_bytes=total_bytes, slots=slots):
        print(row, flush=True)
        rows += row.rows()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
