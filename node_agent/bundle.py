"""Makes the tokenizer bundle of a checkpoint: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from node_agent.disk import write_atomically
from node_agent.errors import NodeError
from node_agent.gguf import read_gguf
from node_agent.gguf_vocab import gguf_tokenizer, read_vocabulary, refuse
from policies.contract.bundle import Bundle, decode_bundle, encode_bundle
from policies.contract.checkpoint_text import (
    MAX_VOCAB,
    UnusableConfig,
    assemble,
    parser_family_of,
    stop_ids,
    template_of,
)

BUILDER_VERSION = 3  # part of the cache key: raise it when the same file gives another bundle
# What a built tokenizer must give back unchanged before it is published.
PROBES = (
    "The capital of France is Paris.",
    "  leading, trailing  \n\n\ttabs\r\n",
    "def f(x: int) -> int:\n    return x ** 2  # 1234567890 3.14",
    "naïve café, Ελληνικά, 東京タワー, העברית",
    "👩‍👩‍👧‍👦 🇯🇵 x² ½ Ⅷ ٣",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
)


# --- GGUF ---------------------------------------------------------------------------------------


def require_round_trips(tokenizer: Tokenizer) -> None:
    """Raises NodeError when a probe text does not come back from its own ids."""
    for probe in PROBES:
        ids = tokenizer.encode(probe, add_special_tokens=False).ids
        back = tokenizer.decode(ids, skip_special_tokens=False)
        if back != probe:
            raise refuse(
                "round trip",
                found=f"{back!r} for {probe!r}",
                allowed="the text itself",
                remedy="the vocabulary is damaged or its rules are others: pull the file again",
            )


def gguf_bundle(
    values: Mapping[str, object],
    *,
    context_tokens: int | None,
    page_size: int,
    labels: Sequence[str],
) -> Bundle:
    """The bundle of a GGUF file's metadata; context_tokens None takes the file's own."""
    vocabulary = read_vocabulary(values)
    tokenizer = gguf_tokenizer(vocabulary, values)
    require_round_trips(tokenizer)
    tokens, bos, eos = vocabulary.tokens, vocabulary.bos_id, vocabulary.eos_id
    architecture = values.get("general.architecture")
    context = context_tokens or values.get(f"{architecture}.context_length")
    template = values.get("tokenizer.chat_template")
    return Bundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template if isinstance(template, str) else None,
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        stop_token_ids=stop_ids(tokenizer, vocabulary.end_ids),
        add_bos=vocabulary.add_bos and bos is not None,
        context_tokens=_positive("context_length", context),
        page_size=page_size,
        vocab_size=len(tokens),
        labels=tuple(labels),
    )


def _positive(field: str, found: object) -> int:
    if type(found) is not int or found <= 0:
        raise _unusable(field, found)
    return found


def _unusable(field: str, found: object) -> NodeError:
    return refuse(
        field,
        found=repr(found),
        allowed="a positive number of tokens",
        remedy="convert the checkpoint again, or name a model of the catalogue",
    )


# --- Hugging Face folder ------------------------------------------------------------------------


def folder_bundle(
    folder: Path, *, context_tokens: int | None, page_size: int, labels: Sequence[str]
) -> Bundle:
    """The bundle of a folder with config.json and tokenizer.json."""
    tokenizer_json, tokenizer, probe = _folder_tokenizer(folder)
    settings = _json(folder / "tokenizer_config.json")
    try:
        return assemble(
            tokenizer_json,
            tokenizer,
            config=_json(folder / "config.json", required=True),
            settings=settings,
            generation=_json(folder / "generation_config.json"),
            chat_template=_folder_template(folder, settings),
            begins_with=probe[0] if probe else None,
            context_tokens=context_tokens,
            page_size=page_size,
            labels=labels,
        )
    except UnusableConfig as error:
        raise _unusable(error.field, error.value) from error


def _folder_tokenizer(folder: Path) -> tuple[bytes, Tokenizer, list[int]]:
    """(the file, its tokenizer, the ids of a letter as the file wants prompts to begin)."""
    try:
        tokenizer_json = (folder / "tokenizer.json").read_bytes()
        tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        highest = max(tokenizer.get_vocab().values(), default=0)
        if highest >= MAX_VOCAB:
            raise ValueError(f"token id {highest}, ids go to {MAX_VOCAB - 1}")
        return tokenizer_json, tokenizer, tokenizer.encode("a").ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # OSError, UnicodeError, the library's Exception or its panic
        raise refuse(
            f"{folder.name}/tokenizer.json",
            found=str(error)[:200],
            allowed="a Hugging Face tokenizers file",
            remedy="save one: AutoTokenizer.from_pretrained(…).save_pretrained(folder)",
        ) from error


def _json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise NodeError(
            f"checkpoint {path.parent.name}/{path.name}",
            found=str(error),
            allowed="a JSON object",
            remedy="copy the file again from the model's source",
        ) from error


def _folder_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        try:
            return own_file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise NodeError(
                f"checkpoint {folder.name}/{own_file.name}",
                found=str(error)[:200],
                allowed="a template in UTF-8",
                remedy="copy the file again from the model's source",
            ) from error
    return template_of(settings)


# --- on disk ------------------------------------------------------------------------------------


def load_bundle(
    path: Path,
    cache: Path,
    *,
    source_digest: str,
    context_tokens: int | None,
    page_size: int,
    labels: Sequence[str],
    chat_template: str | None = None,
) -> tuple[Path, bytes]:
    """(file, encoded bundle) of a checkpoint (.gguf file or folder), built once for each digest.

    source_digest names what the bundle is made of, chat_template replaces the checkpoint's own.
    Building takes a second or two, a hit milliseconds. Raises NodeError where the checkpoint gives
    no bundle or the folder takes none.
    """
    parts = (BUILDER_VERSION, source_digest, context_tokens, page_size, tuple(labels))
    recipe = repr((*parts, chat_template))
    target = cache / f"{sha256(recipe.encode()).hexdigest()[:32]}.bundle"
    encoded = _read_cached(target)
    if encoded is not None:
        return target, encoded
    make = folder_bundle if path.is_dir() else _file_bundle
    bundle = make(path, context_tokens=context_tokens, page_size=page_size, labels=labels)
    template = bundle.chat_template if chat_template is None else chat_template
    encoded = encode_bundle(
        msgspec.structs.replace(
            bundle, chat_template=template, parser_family=parser_family_of(template)
        )
    )
    write_atomically(target, encoded)
    return target, encoded


def _read_cached(target: Path) -> bytes | None:
    """A damaged file counts as absent: it is built again."""
    try:
        encoded = target.read_bytes()
        decode_bundle(encoded)
    except (OSError, msgspec.MsgspecError):
        return None
    return encoded


def _file_bundle(
    path: Path, *, context_tokens: int | None, page_size: int, labels: Sequence[str]
) -> Bundle:
    values = read_gguf(path).metadata
    return gguf_bundle(values, context_tokens=context_tokens, page_size=page_size, labels=labels)
