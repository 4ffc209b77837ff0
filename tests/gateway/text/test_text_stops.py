"""Stop strings: nothing of a match leaks, nothing else is held back, whatever the chunks."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stops import Stops

few_letters = st.text(alphabet="abc", min_size=1, max_size=6)


def slow_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the match that ends first wins, then the longest."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


def slow_held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that is a proper prefix of a stop string."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@given(st.lists(few_letters, max_size=12), st.lists(few_letters, min_size=1, max_size=5))
def test_any_chunking_stops_where_the_whole_does(chunks: list[str], stops: list[str]) -> None:
    finder = Stops(stops)
    sent = "".join(finder.push(chunk) for chunk in chunks) + finder.flush()
    assert (sent, finder.is_matched) == slow_stop("".join(chunks), stops)


@given(st.lists(few_letters, max_size=12), st.lists(few_letters, min_size=1, max_size=5))
def test_only_a_possible_beginning_is_held_back(chunks: list[str], stops: list[str]) -> None:
    finder = Stops(stops)
    seen, sent = "", ""
    for chunk in chunks:
        seen += chunk
        sent += finder.push(chunk)
        if finder.is_matched:
            break
        assert len(seen) - len(sent) == slow_held(seen, stops)


def test_prefix_of_a_stop_does_not_leak() -> None:
    finder = Stops(["</answer>"])
    assert [finder.push(part) for part in ("yes</", "ans", "wer>", "tail")] == ["yes", "", "", ""]
    assert finder.is_matched


def test_tail_is_not_flushed_after_the_match() -> None:
    finder = Stops(["END"])
    assert finder.push("okEND of story") == "ok"
    assert finder.push("more") == ""
    assert finder.flush() == ""


def test_a_false_beginning_is_sent_once_refuted() -> None:
    finder = Stops(["aab"])
    assert finder.push("aa") == ""
    assert finder.push("a") == "a"
    assert finder.push("c") == "aac"


def test_longer_of_two_stops_that_end_together_is_cut() -> None:
    finder = Stops(["bc", "abc"])
    assert finder.push("xabc") == "x"


def test_a_long_stop_that_keeps_almost_matching_takes_linear_time() -> None:
    finder = Stops(["a" * 20_000 + "b"])
    started = time.thread_time()
    sent = sum(len(finder.push("a")) for _ in range(100_000))
    assert sent == 80_000
    assert time.thread_time() - started < 5.0


def test_ten_thousand_stops_are_safe() -> None:
    started = time.thread_time()
    finder = Stops([f"stop-{number:05}" for number in range(10_000)])
    text = "stop-stop-9999 " * 2_000
    assert finder.push(text) + finder.push("stop-09999") == text
    assert finder.is_matched
    assert time.thread_time() - started < 5.0


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_no_stop_and_empty_stop_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        Stops(stops)


def test_characters_that_mean_something_in_patterns_are_plain() -> None:
    for stop in ("]", "^", "-", "\\", "[a-z]", "^-]"):
        assert Stops([stop]).push(f"keep {stop}") == "keep "
