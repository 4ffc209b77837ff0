"""A mover in a process of its own, for tests that kill or stop it. Its arguments: its side, the id
and the secret in hex, whether it comes as far as RECEIVING or SENDING, and the receiver's address.

It says where it listens, then "quiet" when its transfer is, and ends when its input does.
"""

from __future__ import annotations

import sys
import threading

from engine.schedule.transfer_orders import Accepted, Expect, TransferQuiet
from tests.engine.transfer.movers import Split, Station, until


def main(name: str, transfer_id: str, secret: str, goes_on: str, address: str) -> None:
    side = Station(seed=1 if name == "sender" else 2, ways=())
    split = Split(side, side, within_s=60.0)
    split.id, split.secret, split.address = (
        bytes.fromhex(transfer_id),
        bytes.fromhex(secret),
        address,
    )
    print(side.mover.address, flush=True)
    if name == "receiver":
        side.give(split.imported if goes_on else Expect(split.id, split.secret, split.deadline))
    else:
        side.give(split.export)
        if goes_on:
            until(lambda: Accepted(split.id, 1) in side.poll())
            side.give(split.send(1, 3))

    def watch() -> None:
        until(lambda: TransferQuiet(split.id) in side.poll(), 60.0)
        print("quiet", flush=True)

    threading.Thread(target=watch, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
