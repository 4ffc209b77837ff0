"""A peer's engine in its own process: asked, lost, late, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import driven
from benchmarks.peers.driven import DrivenEngine, PeerLost
from tests.processes import wait_gone

ENGINE = """
import os, signal, sys, time
from benchmarks.peers.driver import serve

class Fake:
    def about(self):
        print("noise on stdout")
        return f"process {os.getpid()}"
    def first_token(self, prompt):
        return len(prompt) / 10
    def steps(self, count):
        return [1.0, 2.0, 30.0][:count]
    def greedy(self, prompt, count):
        return prompt[-1:] * count
    def start_decoding(self, prompts):
        raise ValueError(f"no room for {len(prompts)}")
    def agents(self, *script):
        os.kill(os.getpid(), signal.SIGKILL)
    def logits(self, tokens, path):
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
    def warm_first_token(self):
        time.sleep(60)

if "refuse" in sys.argv:
    sys.exit("the model is too large")
serve(Fake)
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "fake_driver.py"
    path.write_text(ENGINE)
    return [sys.executable, str(path)]


@pytest.fixture
def peer(script, tmp_path):
    made = DrivenEngine(script, {}, tmp_path / "log", limit_s=60)
    yield made
    made.close()


def pid_of(peer: DrivenEngine) -> int:
    return int(peer.about.split()[1])


def test_it_answers_through_the_noise_of_its_libraries(peer) -> None:
    assert peer.first_token([1, 2, 3]).s == pytest.approx(0.3)
    assert peer.step(3).s == 2.0
    assert peer.greedy([4, 5], 2) == [5, 5]


def test_an_answer_tells_the_cpu_time_that_it_took_and_memory_is_its_own(peer) -> None:
    idle = peer.spend("first_token", [1])
    busy = peer._ask("logits", [1], "")["cpu_s"]
    assert idle.cpu_s < 0.1 < 0.3 <= busy < 1.0
    memory = peer.memory()
    assert 0 < memory["file_mb"] < memory["resident_mb"] <= memory["peak_mb"] < 200


def test_a_fault_is_told_and_loses_the_peer(peer) -> None:
    with pytest.raises(PeerLost, match="ValueError: no room for 2"):
        peer.start_decoding([[1], [1]])


def test_a_death_is_told_with_its_signal(peer) -> None:
    with pytest.raises(PeerLost, match="killed by signal 9"):
        peer.agents([1], [[[1]]], 1)


def test_a_late_answer_loses_the_peer_and_its_process_is_ended(peer, monkeypatch) -> None:
    monkeypatch.setattr(driven, "CALL_LIMIT_S", 0.2)
    monkeypatch.setattr(driven, "STOP_PATIENCE_S", 1.0)
    with pytest.raises(PeerLost, match="no answer within"):
        peer.warm_first_token()
    peer.close()
    wait_gone([pid_of(peer)], 30)


def test_one_that_does_not_start_says_its_last_words(script, tmp_path) -> None:
    with pytest.raises(PeerLost, match="exit status 1; the model is too large"):
        DrivenEngine([*script, "refuse"], {}, tmp_path / "log", limit_s=60)


def test_it_ends_when_it_is_closed_and_when_the_benchmark_is_killed(peer, script, tmp_path) -> None:
    peer.close()
    wait_gone([pid_of(peer)], 30)
    started = f"DrivenEngine({script!r}, {{}}, Path({str(tmp_path / 'log')!r}), limit_s=60)"
    parent = f"""
import time
from pathlib import Path
from benchmarks.peers.driven import DrivenEngine
peer = {started}
print(peer.about, flush=True)
time.sleep(60)
"""
    benchmark = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(driven.ROOT)},
    )
    with benchmark:
        assert benchmark.stdout is not None
        child = int(benchmark.stdout.readline().split()[1])
        benchmark.send_signal(signal.SIGKILL)
    wait_gone([child], 30)
