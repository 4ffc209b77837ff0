"""A stream's tokens as text that is safe to send, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.detokenize import TextStream
from gateway.text.stops import Stops


class OutputText:
    """Detokenises and looks for stop strings; any chunking gives the same whole."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self._stream = stream
        self._stops = Stops(stops) if stops else None
        self._num_tokens = 0
        self.stopped_at: int | None = None  # completion tokens through the one that made the match

    def push(self, tokens: Sequence[int]) -> str:
        """Text to send now; empty after a match."""
        if self._stops is None:
            return self._stream.push(tokens)
        pieces: list[str] = []
        for token in tokens:
            if self.stopped_at is not None:
                break
            self._num_tokens += 1
            pieces.append(self._through_stops(self._stops, self._stream.push((token,))))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest at the end of the stream, through the same stop strings."""
        if self._stops is None:
            return self._stream.flush()
        if self.stopped_at is not None:
            return ""
        text = self._through_stops(self._stops, self._stream.flush())
        return text if self.stopped_at is not None else text + self._stops.flush()

    def _through_stops(self, stops: Stops, text: str) -> str:
        if not text:
            return ""
        sendable = stops.push(text)
        if stops.is_matched:
            self.stopped_at = self._num_tokens
        return sendable
