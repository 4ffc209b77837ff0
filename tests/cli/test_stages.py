"""Stage lines: what a child prints, what the screen shows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gateway.cli.loading import read_loading
from gateway.cli.models import read_progress
from gateway.cli.stages import Fault, Stage, StageScreen, read_fault, read_stage


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (b'{"stage": "load", "seconds": 1.25, "detail": "135M"}', Stage("load", 1.25, "135M")),
        (b'{"event": "stage", "stage": "load", "seconds": 2}', Stage("load", 2.0, "")),
        (b'{"stage": "load"}', Stage("load", None, "")),
        (b'{"stage": 3}', None),
        (b'{"event": "ready"}', None),
        (b"[1, 2]", None),
        (b"warming up", None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_read_stage(line: bytes, stage: Stage | None) -> None:
    assert read_stage(line) == stage


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            b'{"event": "error", "error": {"field": "--model x", "found": "no such model",'
            b' "allowed": "y", "remedy": "name y", "more": 1}}',
            Fault("--model x", "no such model", "y", "name y"),
        ),
        (b'{"event": "error", "error": {"field": "--model x"}}', None),
        (b'{"event": "error", "error": "no"}', None),
        (b'{"event": "ready", "error": {}}', None),
        (b"[1, 2]", None),
        (b"", None),
    ],
)
def test_read_fault(line: bytes, fault: Fault | None) -> None:
    assert read_fault(line) == fault


def test_a_stage_is_shown_with_its_seconds_and_not_as_markup() -> None:
    out = io.StringIO()
    screen = StageScreen(Console(file=out, width=100), 3.5)
    screen.begin("starting gateway, n1")
    screen.show("n1", Stage("load [red]weights[/red]", 1.5, "98 MiB"))
    screen.end()
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting gateway, n1 (last time 3.5 s)"
    assert lines[1].split() == ["n1", "1.50s", "load", "[red]weights[/red]", "98", "MiB"]


def test_an_hours_pull_is_a_line_each_half_minute_off_a_terminal() -> None:
    out, now = io.StringIO(), [0.0]
    screen = StageScreen(Console(file=out, width=100), None, clock=lambda: now[0])
    for second in range(0, 3600, 2):
        now[0] = float(second)
        screen.show("n1", Stage("download", None, f"{second} of 3600 MiB"))
        screen.show("n2", Stage("wait for another pull", None, ""))
    screen.show("n1", Stage("checkpoint", 3600.0, ""))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 * 120 + 1
    assert lines[0].split() == ["n1", "download", "0", "of", "3600", "MiB"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"event":"engine_loading","stage":"weights","share":0.25}', "weights 25%"),
        (b'{"event":"engine_loading","stage":"open"}', "open"),
        (b'{"event":"engine_error","message":"no memory"}', None),
        (b"Killed", None),
    ],
)
def test_read_loading(line: bytes, said: str | None) -> None:
    assert read_loading(line) == said


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            b'{"event":"progress","stage":"verify","bytes":5,"total_bytes":9}',
            ("verify", 5, 9),
        ),
        (b'{"event":"stage","stage":"verify"}', None),
        (b"warning: slow", None),
    ],
)
def test_read_progress(line: bytes, found: tuple[str, int, int] | None) -> None:
    assert read_progress(line) == found
