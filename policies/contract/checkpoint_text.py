"""What a checkpoint's folder says of its text, as a bundle: the same for who serves the model and
for who only counts its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from policies.contract.bundle import Bundle

MAX_VOCAB = 1 << 22
# Texts that end a completion wherever they are control tokens (llama.cpp's end-of-generation set).
END_TEXTS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "</s>",
)


class UnusableConfig(ValueError):
    """config.json lacks a number that a bundle needs, or has another thing in its place."""

    def __init__(self, field: str, value: object) -> None:
        super().__init__(f"{field}: {value!r}")
        self.field = field
        self.value = value


class Vocabulary(Protocol):
    """A Hugging Face tokenizer, as far as a bundle asks it."""

    def token_to_id(self, token: str, /) -> int | None: ...
    def id_to_token(self, id: int, /) -> str | None: ...
    def get_vocab_size(self) -> int: ...
    def get_added_tokens_decoder(self) -> Mapping[int, Any]: ...


def assemble(
    tokenizer_json: bytes,
    tokenizer: Vocabulary,
    *,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
    chat_template: str | None,
    begins_with: int | None,
    context_tokens: int | None,
    page_size: int,
    labels: Sequence[str] = (),
) -> Bundle:
    """Of config.json, tokenizer_config.json and generation_config.json. Raises UnusableConfig.

    begins_with: the first id that the tokenizer gives a text of its own accord.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}  # of a model that also sees
    bos, eos = (
        _token_text(settings.get(f"{name}_token"))
        or _text_of(tokenizer, config.get(f"{name}_token_id", text.get(f"{name}_token_id")))
        for name in ("bos", "eos")
    )
    named = [
        *_ids(generation.get("eos_token_id")),
        *_ids(config.get("eos_token_id")),
        *_ids(text.get("eos_token_id")),
        *([] if eos is None else _ids(tokenizer.token_to_id(eos))),
    ]
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    return Bundle(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        bos_token=bos,
        eos_token=eos,
        stop_token_ids=stop_ids(tokenizer, named),
        add_bos=bos_id is not None
        and (begins_with == bos_id or settings.get("add_bos_token") is True),
        context_tokens=_positive(
            "max_position_embeddings",
            context_tokens
            or config.get("max_position_embeddings")
            or text.get("max_position_embeddings"),
        ),
        page_size=page_size,
        vocab_size=_positive(
            "vocab_size",
            config.get("vocab_size") or text.get("vocab_size") or tokenizer.get_vocab_size(),
        ),
        labels=tuple(labels),
    )


def stop_ids(tokenizer: Vocabulary, named: Sequence[int]) -> tuple[int, ...]:
    """The ids the checkpoint names as its end, then every special token that always is one."""
    specials = {
        added.content: index
        for index, added in tokenizer.get_added_tokens_decoder().items()
        if added.special
    }
    known = [specials[text] for text in END_TEXTS if text in specials]
    return tuple(dict.fromkeys([*named, *known]))


def template_of(settings: Mapping[str, object]) -> str | None:
    """The chat template in tokenizer_config.json; of several named ones the default."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def parser_family_of(template: str | None) -> str | None:
    """The form in which a template has the model write tool calls, None where it is not known.

    Hermes: a JSON object of name and arguments between `<tool_call>` marks. Others write those
    marks too, around a form of their own (`<function=…>`, `<arg_key>`).
    """
    source = (template or "").replace("\\", "")  # quotes are escaped where jinja has them in a text
    shown = all(part in source for part in ("tools", "<tool_call>", '"name":', '"arguments":'))
    foreign = "<function=" in source or "<arg_key>" in source
    return "hermes" if shown and not foreign else None


def _positive(field: str, found: object) -> int:
    if type(found) is not int or found <= 0:
        raise UnusableConfig(field, found)
    return found


def _token_text(found: object) -> str | None:
    """A token is written as its text or as an object with `content`."""
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else None


def _text_of(tokenizer: Vocabulary, found: object) -> str | None:
    """The token that a config's id names; an id may stand in a list."""
    ids = _ids(found)
    return tokenizer.id_to_token(ids[0]) if ids else None


def _ids(found: object) -> list[int]:
    values = found if isinstance(found, list) else [found]
    return [value for value in values if type(value) is int and 0 <= value < MAX_VOCAB]
