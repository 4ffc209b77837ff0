"""Frames survive any cut of the stream, and a wrong header is told at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.framing import FrameError, FrameReader, frame


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 254), st.binary(max_size=50)), max_size=8),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_any_cut_of_the_stream_gives_the_same_frames(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(frame(channel, message) for channel, message in frames)
    reader, found, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found += list(reader.feed(stream[at : at + size]))
        at, turn = at + size, turn + 1
    assert found == frames


def test_the_header_is_length_of_the_message_then_channel() -> None:
    assert frame(3, b"ab") == b"\x02\x00\x00\x00\x03ab"


@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff\x01", b"\x01\x00\x00\x00\xff"])
def test_a_wrong_header_is_an_error_and_not_a_long_wait(header: bytes) -> None:
    with pytest.raises(FrameError, match="frame header"):
        list(FrameReader().feed(header))


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(FrameError, match="channel"):
        frame(255, b"")
    with pytest.raises(FrameError, match="bytes"):
        frame(1, bytes((16 << 20) + 1))
