"""What happens before a node runs: models made ready, threads shared, stages told."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from node_agent import checkpoints
from node_agent.app import Stopped, _ProgressLines, prepare_models
from node_agent.config import NodeConfig
from node_agent.pull import Fetch
from node_agent.stages import EngineStages, StageLines, stage
from policies.contract.wire import EngineUp
from tests.node_agent.conftest import info


def config(home: Path, **more: object) -> NodeConfig:
    return NodeConfig(("ws://x",), "t", (), home, **more)  # type: ignore[arg-type]


def test_a_stop_during_a_pull_ends_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    pid_file = tmp_path / "pid"
    fetch = Fetch((sys.executable, "-c", program, str(pid_file)), poll_s=0.05)
    monkeypatch.setattr(checkpoints, "PIP_FETCH", fetch)
    models = tmp_path / "models"
    monkeypatch.setenv("KAGARI_MODELS", str(models))
    stop, lines = threading.Event(), []

    def stop_once_it_runs() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=stop_once_it_runs, daemon=True).start()
    begun = time.monotonic()
    with pytest.raises(Stopped):
        prepare_models(config(tmp_path), lines.append, stop)
    assert time.monotonic() - begun < 30
    assert [path.name for path in models.iterdir() if not path.name.endswith(".lock")] == []
    assert lines[0]["stage"] == "download"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_closed_stdout_does_not_end_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    emit = StageLines()
    emit({"event": "stage"})
    emit({"event": "stage"})
    assert len(written) == 1  # not tried again


def test_stages_of_a_loading_engine_have_their_seconds() -> None:
    lines: list[dict[str, object]] = []
    clock = [0.0]
    stages = EngineStages(lines.append, ["m0", "m1"], lambda: clock[0])
    for clock[0], index, name, share in [
        (0.0, 0, "weights", 0.0),
        (1.0, 1, "open", 1.0),
        (2.0, 0, "weights", 0.5),
        (3.0, 0, "weights", 1.0),
        (4.0, 0, "warming", 0.0),
        (5.0, 1, "a", 0.2),
        (6.0, 1, "b", 0.0),
    ]:
        stages.on_loading(index, name, share)
    clock[0] = 7.0
    stages.on_up(EngineUp(info(0), 7.5))
    assert [(line["stage"], line["seconds"], line["detail"]) for line in lines] == [
        ("open", 0.0, "m1"),
        ("weights", 3.0, "m0"),
        ("a", 1.0, "m1"),
        ("warming", 3.0, "m0"),
        ("engine", 7.5, "m0, 8 pages"),
    ]


def test_a_stage_that_fails_writes_no_line() -> None:
    lines: list[dict[str, object]] = []
    with stage(lines.append, "good", "detail"):
        pass
    with pytest.raises(KeyError), stage(lines.append, "bad", "detail"):
        raise KeyError
    assert [(line["stage"], line["event"]) for line in lines] == [("good", "stage")]


def test_waiting_for_another_pull_is_said_once_in_a_while() -> None:
    """The lock is tried ten times a second, and of a hub's pull no size is known yet."""
    lines: list[dict[str, object]] = []
    progress = _ProgressLines(lines.append, None)
    for _ in range(50):
        progress("wait for another pull", 0, 0)
    assert [line["detail"] for line in lines] == [""]
    progress("download", 5 << 20, 5 << 20)
    assert lines[-1]["detail"] == "5 of 5 MiB"
