"""Which texts of a tokenizer are control tokens, and a tokenizer that can never produce one.

A *control token* is an added token that must come from the template alone, such as `<|im_end|>` or
`<tool_call>`. Added tokens that are mere whitespace runs, or one character, are ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from tokenizers import Tokenizer

from gateway.text.errors import BundleError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ControlToken:
    text: str
    token_id: int
    special: bool  # no text when decoded; `<tool_call>` and `<think>` are often not special
    strict: bool  # matched as it stands: takes no neighbouring space, is not normalised


def read_tokenizer(data: bytes) -> Json:
    """A tokenizer.json made fit for prompts. Raises BundleError when it is not one.

    It neither cuts nor pads nor adds anything, and what a BPE does not know it drops, as llama.cpp
    does, where the file would put a control token there (`unk_token: <|endoftext|>`).
    """
    try:
        parsed = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise BundleError(f"tokenizer_json: found no JSON ({error})") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise BundleError("tokenizer_json: found no object with a model in it")
    parsed |= {"truncation": None, "padding": None, "post_processor": None}
    if "merges" in parsed["model"]:
        parsed["model"]["unk_token"] = None
    return cast(Json, parsed)


def build_tokenizer(parsed: Json) -> Tokenizer:
    """Raises BundleError when the library cannot build it."""
    try:
        return Tokenizer.from_buffer(msgspec.json.encode(parsed))
    except Exception as error:  # the library raises bare Exception
        raise BundleError(f"tokenizer_json: found no tokenizer ({error})") from error


def control_tokens(tokenizer: Tokenizer, parsed: Json) -> tuple[ControlToken, ...]:
    unknown = _unknown_text(parsed["model"])
    return tuple(
        ControlToken(
            text=token.content,
            token_id=token_id,
            special=token.special,
            strict=not (token.lstrip or token.rstrip or token.single_word or token.normalized),
        )
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if len(token.content.replace("\u2581", " ").strip()) > 1 and token.content != unknown
    )


def _unknown_text(model: Json) -> str | None:
    """The token for what the vocabulary lacks: any text may contain it, so it controls nothing."""
    unk_id = model.get("unk_id")
    if isinstance(unk_id, int):
        return cast(str, model["vocab"][unk_id][0])
    return cast("str | None", model.get("unk_token"))


def plain_tokenizer(parsed: Json, control: Set[str]) -> Tokenizer:
    """The same tokenizer without control tokens: no text whatever encodes to one of their ids.

    Leaving them out of added_tokens stops the matching before the model. The model itself could
    still find them in its vocabulary (Unigram, `ignore_merges`), so there they get names that no
    text can hold: U+FDD1, a noncharacter, is refused in prompts as U+FDD0 is.
    """
    model = dict(parsed["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {_hidden(text, control): index for text, index in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[_hidden(text, control), score] for text, score in vocab]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _meets(merge, control)]
    added = [token for token in parsed.get("added_tokens") or () if token["content"] not in control]
    return build_tokenizer(parsed | {"model": model, "added_tokens": added})


HIDDEN = "\ufdd1"


def _hidden(text: str, control: Set[str]) -> str:
    return HIDDEN + text if text in control else text


def _meets(merge: str | list[str], control: Set[str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in control or right in control or left + right in control


def any_of(texts: Iterable[str], *, rest: Literal["?:", "?="] = "?:") -> str:
    """A pattern for the leftmost, longest of texts, as the tokenizer matches its added tokens.

    Texts with the same first character share it, so that the regex engine scans for that character.
    With rest="?=" only that character is consumed, so that texts which overlap are all found.
    """
    by_first: dict[str, list[str]] = {}
    for text in sorted(set(texts), key=len, reverse=True):
        by_first.setdefault(text[0], []).append(re.escape(text[1:]))
    if not by_first:
        return "(?!)"  # matches nothing
    return "|".join(
        f"{re.escape(first)}({rest}{'|'.join(rests)})" for first, rests in by_first.items()
    )
