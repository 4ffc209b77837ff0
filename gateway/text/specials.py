"""Which texts of a tokenizer are control tokens, and a tokenizer that can never produce one.

A *control token* is an added token that must come from the template alone, such as `<|im_end|>` or
`<tool_call>`. Added tokens that are mere whitespace runs, one character, or tags of HTML (Gemma
has `<h1>` and `</table>`) are ordinary text: whoever writes them means what they say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from tokenizers import AddedToken, Tokenizer

from gateway.text.errors import BundleError

Json = dict[str, Any]

MAX_BRANCHES_DEEP = 40  # of a pattern for many texts
HTML_TAG = re.compile(
    "</?(?:a|b|bbox|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s|span"
    "|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)


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
        if not _is_text(token) and token.content != unknown
    )


def _is_text(token: AddedToken) -> bool:
    if len(token.content.replace("\u2581", " ").strip()) <= 1:
        return True
    return not token.special and HTML_TAG.fullmatch(token.content) is not None


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

    Texts with a common beginning share it, so that thousands of them cost as little as ten.
    With rest="?=" only the first character is consumed, so that texts which overlap are all found.
    """
    by_first = _by_first(texts)
    if not by_first:
        return "(?!)"  # matches nothing
    return "|".join(
        f"{re.escape(first)}({rest}{_longest_of(rests, MAX_BRANCHES_DEEP)})"
        for first, rests in by_first.items()
    )


def _longest_of(texts: set[str], depth: int) -> str:
    if depth == 0:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    shared = _shared_beginning(texts)
    rests = {text[len(shared) :] for text in texts}
    if rests == {""}:
        return re.escape(shared)
    branches = "|".join(
        f"{re.escape(first)}(?:{_longest_of(after, depth - 1)})"
        for first, after in _by_first(rests - {""}).items()
    )
    return f"{re.escape(shared)}(?:{branches}){'?' if '' in rests else ''}"


def _shared_beginning(texts: set[str]) -> str:
    low, high = min(texts), max(texts)
    for place, character in enumerate(low):
        if not high.startswith(character, place):
            return low[:place]
    return low


def _by_first(texts: Iterable[str]) -> dict[str, set[str]]:
    """What follows each first character."""
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    return rests
