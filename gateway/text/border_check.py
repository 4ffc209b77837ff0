"""Decides at load whether control tokens are hard borders, so that segments may be encoded apart.

First the rules that make them borders, then a fuzz: two thousand strings of control tokens and
awkward text must encode to the same ids whole and by segments. The seed is fixed: same verdict.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from gateway.text.specials import ControlToken, Json

NUM_STRINGS = 2_000
BATCH = 250
# What BPE merges, normalisers and pre-tokenisers are known to treat in their own way at an edge.
AWKWARD = (
    *' \n\t\x0b\x00\u00a0\u3000\u2028\u200d\u0301\ufe0f\ufeff\ufffd1_-."{éßا한½🙂',  # each alone
    *(
        "  ",
        "   ",
        "\n\n",
        "\r\n",
        "\\n",
        "e\u0301",
        "\U0001f1e9\U0001f1ea",
        "👨\u200d👩",
        "x²",
        "日本",
    ),
    *("the", " The", "user", "def f(x):", "'s", "'ll", "23", "...", "A" * 9, "<|", "|>"),
)


def borders_hold(
    parsed: Json,
    control: Sequence[ControlToken],
    *,
    full: Tokenizer,
    by_segments: Callable[[list[str]], list[list[int]]],
) -> bool:
    """Whether encoding by segments equals encoding whole, by the rules and by the fuzz."""
    return (
        bool(control)
        and all(token.strict for token in control)
        and (_is_byte_level(parsed.get("pre_tokenizer")) or _is_sentencepiece(parsed))
        and all(
            [encoding.ids for encoding in full.encode_batch_fast(batch, add_special_tokens=False)]
            == by_segments(batch)
            for batch in _fuzz([token.text for token in control])
        )
    )


def _is_byte_level(pre_tokenizer: object) -> bool:
    """ByteLevel without a space put in front, and nothing that puts one (Metaspace)."""
    steps = list(_steps(pre_tokenizer))
    kinds = {step.get("type") for step in steps}
    return (
        "ByteLevel" in kinds
        and "Metaspace" not in kinds
        and not any(step.get("add_prefix_space") for step in steps)
    )


def _is_sentencepiece(parsed: Json) -> bool:
    """BPE on `▁` for spaces: these steps treat what lies between added tokens by itself."""
    kinds = {
        step.get("type")
        for part in ("normalizer", "pre_tokenizer")
        for step in _steps(parsed.get(part))
    }
    return parsed["model"].get("type") == "BPE" and kinds <= {
        *("Sequence", "Prepend", "Replace", "Split")
    }


def _steps(step: object) -> Iterator[dict[str, Any]]:
    if isinstance(step, dict):
        yield step
        for inner in step.get("pretokenizers") or step.get("normalizers") or ():
            yield from _steps(inner)


def _fuzz(control: list[str]) -> Iterator[list[str]]:
    chance = random.Random(0)
    halves = [text[: len(text) // 2] for text in control] + [text[1:] for text in control]
    pieces = (*AWKWARD, *halves)

    def string() -> str:
        parts: list[str] = []
        for _ in range(chance.randint(1, 5)):
            parts.append(chance.choice(control))
            parts.extend(chance.choices(pieces, k=chance.randint(0, 5)))
        return "".join(parts)

    for _ in range(NUM_STRINGS // BATCH):
        yield [string() for _ in range(BATCH)]
