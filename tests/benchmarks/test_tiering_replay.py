"""The replays on a trace small enough to count by hand, and a trace that is missing or wrong."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tiering.replay import (
    make_node,
    replay,
    replay_best,
    replay_infinite,
    replay_lru,
    replay_policy,
)
from benchmarks.tiering.trace import PAGE_TOKENS, Request, read_trace, requests
from benchmarks.trace_file import find_trace

# One chain that comes back after a stranger, who never does; pages of 512 tokens, the last partial.
RETURNS = [(0.0, 1500, [1, 2, 3]), (10.0, 1000, [7, 8]), (20.0, 1600, [1, 2, 3, 4])]


def test_an_infinite_cache_finds_all_that_was_there() -> None:
    assert replay_infinite(requests(RETURNS)) == pytest.approx(3 * 512 / 4100)


def test_a_partial_last_page_counts_for_the_tokens_that_it_has() -> None:
    twice = requests([(0.0, 700, [1, 2]), (1.0, 700, [1, 2])])
    assert replay_infinite(twice) == replay_policy(twice, 2) == 0.5


def test_lru_loses_the_root_and_all_or_the_tail_alone() -> None:
    made = requests(RETURNS)
    assert replay_lru(made, 4, tail_first=False) == 0.0
    assert replay_lru(made, 4, tail_first=True) == pytest.approx(2 * 512 / 4100)


def test_the_best_choice_keeps_what_comes_back_and_skips_the_stranger() -> None:
    made = requests(RETURNS)
    assert replay_best(made, 3) == pytest.approx(3 * 512 / 4100)
    assert replay_best(made, 2) == pytest.approx(2 * 512 / 4100)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Prompts over a small tree of pages: an id is the number of its path."""
    rows = []
    for number in range(draw(st.integers(1, 25))):
        path = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        ids = [int("".join(map(str, path[: end + 1]))) for end in range(len(path))]
        rows.append((10.0 * number, len(ids) * PAGE_TOKENS, ids))
    return requests(rows)


@given(traces(), st.integers(5, 12))
def test_nothing_beats_the_best_choice_nor_that_an_infinite_cache(
    made: list[Request], capacity: int
) -> None:
    best = replay_best(made, capacity)
    lru = [replay_lru(made, capacity, tail_first=tail_first) for tail_first in (True, False)]
    assert max(*lru, replay_policy(made, capacity)) <= best <= replay_infinite(made)
    assert replay_best(made, 10_000) == replay_policy(made, 10_000) == replay_infinite(made)


def test_tiers_add_what_the_quicker_ones_have_lost() -> None:
    """The device keeps two pages, the host all; the disk takes what is used a second time."""
    node = make_node({"device": 2 * PAGE_TOKENS, "host": 99 * PAGE_TOKENS, "disk": 1e6})
    tally = replay(requests(RETURNS), lambda _: node)
    assert sum(tally.hits.values()) == 3 * 512
    assert tally.hits["host"] > 0
    assert tally.written["disk"] == 3
    assert tally.prompt == 4100


def test_a_session_is_a_prompt_that_goes_on_from_the_last_full_page_of_another() -> None:
    rows = [(0.0, 1100, [1, 2, 3]), (1.0, 1100, [1, 5, 6]), (2.0, 1600, [1, 2, 9, 10])]
    assert [one.session for one in requests(rows)] == [0, 1, 0]


def write_trace(path: Path, rows: list[dict[str, object]]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_a_trace_is_read_up_to_a_time(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": at, "input_length": 600, "output_length": 9, "hash_ids": [1, at + 2]}
        for at in (0, 1500, 3000)
    ]
    path = write_trace(tmp_path / "trace.gz", rows)
    made = read_trace(path, until_s=2.0)
    assert [(one.now, one.tokens, len(one.pages)) for one in made] == [(0.0, 600, 2), (1.5, 600, 2)]
    assert made[0].pages[0] is made[1].pages[0]
    assert made[1].pages[1].parent == made[0].keys[0]


def test_a_trace_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no file"):
        find_trace(str(tmp_path / "nowhere.gz"))


def test_a_trace_of_another_format_is_told(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.gz", [{"timestamp": 0}])
    command = [sys.executable, "-m", "benchmarks.tiering", "--trace", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 1
    assert "missing required field `input_length`" in ran.stderr
    assert "remedy:" in ran.stderr
