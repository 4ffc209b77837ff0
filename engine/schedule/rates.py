"""How fast the engine computes, as running averages over its steps."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest step
_TELLING_SHARE = 4  # a prefill under a fourth of the budget measures a step's fixed cost


class Rates:
    """Tokens per second of prefill and of decode, from (tokens, seconds) of each step."""

    def __init__(self, prefill_tokens_per_s: float, step_tokens: int) -> None:
        self._telling_tokens = step_tokens // _TELLING_SHARE
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_tokens_per_s = 0.0

    def record(self, *, prefill_tokens: int, decode_tokens: int, step_s: float) -> None:
        """A mixed step counts for what most of its tokens were."""
        if step_s <= 0.0:
            return
        rate = (prefill_tokens + decode_tokens) / step_s
        if prefill_tokens > decode_tokens:
            if prefill_tokens >= self._telling_tokens:
                self.prefill_tokens_per_s += _WEIGHT * (rate - self.prefill_tokens_per_s)
        elif decode_tokens:
            weight = _WEIGHT if self.decode_tokens_per_s else 1.0
            self.decode_tokens_per_s += weight * (rate - self.decode_tokens_per_s)


class ImportRate:
    """Bytes per second at which pages of other engines land here."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0  # 0: not known yet

    def record(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0.0:
            weight = _WEIGHT if self.bytes_per_s else 1.0
            self.bytes_per_s += weight * (num_bytes / seconds - self.bytes_per_s)
