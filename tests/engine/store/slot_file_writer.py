"""A process of its own with a slot file open: to be killed amid its writes, or in the way.

`python -m tests.engine.store.slot_file_writer FOLDER CAPACITY hold|write`
"""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

from engine.store.slot_file import SlotFileTier
from tests.engine.store.tier_factories import LAYOUT, NEVER, OWNERS, payload_of, record_of


def main(folder: Path, capacity: int, verb: str) -> None:
    tier = SlotFileTier(folder, LAYOUT, capacity)
    print(len(tier.records()), flush=True)
    if verb == "hold":
        time.sleep(60)
        return
    for start in count(0, 4):
        records = [record_of(number, OWNERS[number % 2]) for number in range(start, start + 4)]
        payloads = [memoryview(payload_of(record.key)) for record in records]
        if tier.stats().used_pages + len(records) > capacity:
            tier.remove([record.key for record in list(tier.records())[:4]], NEVER)
        tier.put(records, payloads, NEVER)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
