"""A peer's process is killed or stopped, whatever this side is at: it notices, and lets go."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.schedule.transfer_orders import Accepted, Acked, Arrived, Expect, Offered, Withdraw
from engine.transfer.channel import SILENT_S
from tests.engine.transfer.movers import PATIENCE_S, Split, Station, until

SLACK_S = 12.0  # on a busy machine; the transfer itself has a minute
FAST = {("SENDING", "stop"), ("RECEIVING", "kill")}
CASES = [
    pytest.param(
        state, how, marks=() if (state, how) in FAST else pytest.mark.slow, id=f"{state}-{how}"
    )
    for state in ("DIALLING", "OFFERING", "SENDING", "SETTLING", "DRAINING", "OFFERED", "RECEIVING")
    for how in ("kill", "stop")
]


@contextmanager
def peer(
    side: str, split: Split, *, goes_on: bool, address: str = ""
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.engine.transfer.peer_process"),
            *(side, split.id.hex(), split.secret.hex(), "yes" if goes_on else "", address),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def strike(process: subprocess.Popen[str], how: str) -> None:
    process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    if how == "stop":
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def quiet_soon(split: Split, side: Station, began: float) -> None:
    split.wait_quiet(side)
    assert time.monotonic() - began < SILENT_S + SLACK_S


@pytest.mark.parametrize(("state", "how"), CASES)
def test_a_peer_that_is_gone_is_noticed_in_every_state(state: str, how: str) -> None:
    is_sender = state not in ("OFFERED", "RECEIVING")
    side = Station(seed=1 if is_sender else 2, ways=())
    split = Split(side, side, within_s=60.0)
    goes_on = state not in ("OFFERING", "OFFERED")
    try:
        if is_sender:
            with peer("receiver", split, goes_on=goes_on) as process:
                split.address = line(process)
                began = as_sender(split, state, process, how)
                quiet_soon(split, side, began)
                if state != "DIALLING":  # where it has heard of nobody
                    comes_back(process, how)
        else:
            order = split.imported
            side.give(order if goes_on else Expect(split.id, split.secret, split.deadline))
            with peer("sender", split, goes_on=goes_on, address=split.address) as process:
                kind = Arrived if goes_on else Offered
                until(lambda: any(isinstance(news, kind) for news in side.poll()))
                began = time.monotonic()
                strike(process, how)
                quiet_soon(split, side, began)
                comes_back(process, how)
        failure = side.failure(split.id)
        if state == "DRAINING":  # it was withdrawn here: nobody waits for it
            assert failure is None
        else:
            assert failure is not None
            assert failure.code == ("transfer_lost" if how == "kill" else "transfer_timeout")
    finally:
        side.mover.close(1.0)


def as_sender(split: Split, state: str, process: subprocess.Popen[str], how: str) -> float:
    """Bring it into this state and strike; when that was."""
    side = split.sender
    if state == "DIALLING":
        strike(process, how)
        began = time.monotonic()
        side.give(split.export)
        return began
    side.give(split.export)
    if state == "OFFERING":
        time.sleep(1.5)  # and both say that they live
        assert side.poll() == []
        began = time.monotonic()
        strike(process, how)
        return began
    until(lambda: Accepted(split.id, 1) in side.poll())
    side.give(split.send(1, 2))
    until(lambda: split.positions(side, Acked) == [1])
    if state == "SETTLING":
        strike(process, "stop")  # it hears no more
        side.give(split.send(2, 4), split.last)
    if state == "DRAINING":
        strike(process, "stop")
        side.give(Withdraw(split.id))
    began = time.monotonic()
    strike(process, how)
    return began


def comes_back(process: subprocess.Popen[str], how: str) -> None:
    """Continued, it finds itself alone and lets go too."""
    if how == "stop":
        process.send_signal(signal.SIGCONT)
        until(lambda: line(process) == "quiet")
