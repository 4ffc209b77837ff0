"""A stream's tokens as text that is safe to send, up to the first stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gateway.text.detokenize import TextStream
from gateway.text.stops import Stops


class OutputText:
    """Detokenises and looks for stop strings; any chunking gives the same whole."""

    def __init__(
        self,
        stream: TextStream,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        with_places: bool = False,
    ) -> None:
        """Text of the first min_tokens tokens stops nothing. with_places: `told` is asked for."""
        self._stream = stream
        self._stops = Stops(stops) if stops else None
        self._min_tokens = min_tokens
        self._places = TokenPlaces() if with_places else None
        self._num_tokens = 0
        self.stopped_at: int | None = None  # completion tokens through the one that made the match

    def push(self, tokens: Sequence[int]) -> str:
        """Text to send now; empty after a match."""
        if self._stops is None and self._places is None:
            return self._stream.push(tokens)
        pieces: list[str] = []
        for token in tokens:
            if self.stopped_at is not None:
                break
            self._num_tokens += 1
            text = self._stream.push((token,))
            if self._places is not None:
                self._places.add(len(text))
            pieces.append(self._through_stops(text))
        return self._sent("".join(pieces))

    def flush(self) -> str:
        """The rest at the end of the stream, through the same stop strings."""
        if self.stopped_at is not None:
            return ""
        text = self._through_stops(self._stream.flush())
        if self._stops is not None and self.stopped_at is None:
            text += self._stops.flush()
        return self._sent(text)

    def told(self, *, is_over: bool) -> list[int]:
        """Where the text of each further token begins that the client may be told of now.

        is_over: the stream ended, by itself or by a stop string.
        """
        assert self._places is not None, "made with_places"
        return self._places.take(is_over=is_over, is_cut=self.stopped_at is not None)

    def _through_stops(self, text: str) -> str:
        if not text or self._stops is None or 0 < self._num_tokens <= self._min_tokens:
            return text
        sendable = self._stops.push(text)
        if self._stops.is_matched:
            self.stopped_at = self._num_tokens
        return sendable

    def _sent(self, text: str) -> str:
        if self._places is not None:
            self._places.sent += len(text)
        return text


class TokenPlaces:
    """Which tokens the client may know of: no sooner than their text, and never of text cut off.

    A token without text of its own (the first bytes of a character, or a special one) goes with the
    text that follows it.
    """

    def __init__(self) -> None:
        self.sent = 0  # characters
        self._held: deque[tuple[int, int]] = deque()  # (begin, end) of tokens not told yet
        self._end = 0

    def add(self, num_chars: int) -> None:
        """One more token, of so much text."""
        self._held.append((self._end, self._end + num_chars))
        self._end += num_chars

    def take(self, *, is_over: bool, is_cut: bool) -> list[int]:
        """Where tokens begin that may be told of now; each once."""
        begins: list[int] = []
        while self._held:
            begin, end = self._held[0]
            if is_cut:
                may_be_told = begin < self.sent
            else:
                may_be_told = is_over or self.sent > end or self.sent == end > begin
            if not may_be_told:
                break
            begins.append(begin)
            self._held.popleft()
        return begins
