"""Frames between a node agent and its engine, over one socketpair, the same both ways.

A frame is 4 bytes of length (little endian, of the message alone), 1 byte of channel, then one
msgpack message. Channel 0 is between engine and agent; 1 … 254 are the agent's links, and what the
engine sends there is forwarded undecoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from policies.contract.wire import MAX_FRAME_BYTES

AGENT_CHANNEL = 0
MAX_CHANNEL = 254

_HEADER = Struct("<IB")


class FrameError(ValueError):
    """The byte stream is not what this module writes; nothing after it can be trusted."""


def frame(channel: int, message: bytes) -> bytes:
    """Raises FrameError on a channel or a length that the other side would refuse."""
    if not 0 <= channel <= MAX_CHANNEL:
        raise FrameError(f"channel: found {channel}, allowed 0 to {MAX_CHANNEL}; free a link first")
    if len(message) > MAX_FRAME_BYTES:
        raise FrameError(
            f"message: found {len(message)} bytes, allowed {MAX_FRAME_BYTES}; send it in parts"
        )
    return _HEADER.pack(len(message), channel) + message


class FrameReader:
    """Bytes in, whole frames out: `feed` in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield (channel, message) for each frame completed; raises FrameError on a bad header."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _HEADER.size:
                length, channel = _HEADER.unpack_from(buffer, at)
                if length > MAX_FRAME_BYTES or channel > MAX_CHANNEL:
                    raise FrameError(
                        f"frame header: found {length} bytes on channel {channel}, allowed "
                        f"{MAX_FRAME_BYTES} and {MAX_CHANNEL}; the two sides differ in version"
                    )
                end = at + _HEADER.size + length
                if len(buffer) < end:
                    return
                message = bytes(buffer[at + _HEADER.size : end])
                at = end
                yield channel, message
        finally:
            del buffer[:at]
