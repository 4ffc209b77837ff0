"""The text of a model whose server is foreign: from the tokenizer files that the operator has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.text.errors import BundleError
from gateway.text.model import TextModel
from policies.contract.bundle import Bundle
from policies.contract.checkpoint_text import (
    UnusableConfig,
    assemble,
    parser_family_of,
    template_of,
)


class TextFolderError(Exception):
    """The folder gives no text; the message says which file and why."""


def load_text(folder: str, *, page_size: int, context_tokens: int | None) -> TextModel:
    """Takes about a second: call it in a thread. Raises TextFolderError."""
    try:
        return TextModel.load(_bundle(Path(folder).expanduser(), page_size, context_tokens))
    except (KeyboardInterrupt, SystemExit):
        raise
    # OSError, JSON and template errors, the tokenizers library's Exception or its panic.
    except BaseException as error:
        raise TextFolderError(f"{type(error).__name__}: {str(error)[:200]}") from error


def _bundle(folder: Path, page_size: int, context_tokens: int | None) -> Bundle:
    tokenizer_json = (folder / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    settings = _json(folder / "tokenizer_config.json")
    own_file = folder / "chat_template.jinja"
    template = own_file.read_text("utf-8") if own_file.exists() else template_of(settings)
    try:
        bundle = assemble(
            tokenizer_json,
            tokenizer,
            config=_json(folder / "config.json"),
            settings=settings,
            generation=_json(folder / "generation_config.json"),
            chat_template=template,
            begins_with=next(iter(tokenizer.encode("a").ids), None),
            context_tokens=context_tokens,
            page_size=page_size,
        )
    except UnusableConfig as error:
        raise BundleError(f"config.json: {error.field} is {error.value!r}") from error
    return msgspec.structs.replace(bundle, parser_family=parser_family_of(template))


def _json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}
