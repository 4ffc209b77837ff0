"""Makes the tokenizer bundle of a checkpoint: from a GGUF vocabulary or from a Hugging Face folder.

The GGUF rules are llama.cpp's (src/llama-vocab.cpp) for the pre-tokenizer `smollm`: single digits,
then byte-level BPE without a prefix space; control tokens match as whole pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from node_agent.disk import write_atomically
from node_agent.errors import NodeError
from node_agent.gguf import read_gguf
from policies.contract.bundle import Bundle, decode_bundle, encode_bundle

BUILDER_VERSION = 1  # part of the cache key: raise it when the same file gives another bundle
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
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


def _refuse(field: str, *, found: str, allowed: str, remedy: str) -> NodeError:
    return NodeError(f"tokenizer: {field}", found=found, allowed=allowed, remedy=remedy)


# --- GGUF ---------------------------------------------------------------------------------------


def gguf_tokenizer(values: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of a GGUF vocabulary. Raises NodeError on rules that are not known here."""
    kind = values.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise _refuse(
            "tokenizer.ggml.model",
            found=repr(kind),
            allowed="'gpt2' (byte-level BPE)",
            remedy="serve the model's Hugging Face folder, which brings its tokenizer.json",
        )
    pre = values.get("tokenizer.ggml.pre")
    if pre != "smollm":
        raise _refuse(
            "tokenizer.ggml.pre",
            found=repr(pre),
            allowed="'smollm'",
            remedy="serve the model's Hugging Face folder, which brings its tokenizer.json",
        )
    tokens = _strings(values, "tokenizer.ggml.tokens")
    merges = [_merge(merge) for merge in _strings(values, "tokenizer.ggml.merges")]
    types = values.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise _refuse(
            "tokenizer.ggml.token_type",
            found="absent or of another length",
            allowed=f"{len(tokens)} integers, one a token",
            remedy="convert or pull the file again",
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _refuse(
            "tokenizer.ggml.tokens",
            found=f"{len(tokens) - len(vocab)} tokens that occur twice",
            allowed="tokens that differ",
            remedy="convert or pull the file again",
        )
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library raises bare Exception on a merge of unknown tokens
        raise _refuse(
            "tokenizer.ggml.merges",
            found=str(error),
            allowed="pairs of known tokens",
            remedy="convert or pull the file again",
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    by_kind = {
        kind: [token for token, found in zip(tokens, types, strict=True) if found == kind]
        for kind in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in by_kind[CONTROL]]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in by_kind[USER_DEFINED]]
    )
    return tokenizer


def _strings(values: Mapping[str, object], key: str) -> list[str]:
    found = values.get(key)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise _refuse(
            key,
            found=type(found).__name__,
            allowed="an array of strings",
            remedy="convert or pull the file again",
        )
    return found


def _merge(text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    return left, right


def require_round_trips(tokenizer: Tokenizer) -> None:
    """Raises NodeError when a probe text does not come back from its own ids."""
    for probe in PROBES:
        ids = tokenizer.encode(probe, add_special_tokens=False).ids
        back = tokenizer.decode(ids, skip_special_tokens=False)
        if back != probe:
            raise _refuse(
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
    tokenizer = gguf_tokenizer(values)
    require_round_trips(tokenizer)
    tokens = _strings(values, "tokenizer.ggml.tokens")
    eos, bos = (
        _token_id(values, f"tokenizer.ggml.{name}_token_id", tokens) for name in ("eos", "bos")
    )
    architecture = values.get("general.architecture")
    context = context_tokens or values.get(f"{architecture}.context_length")
    template = values.get("tokenizer.chat_template")
    return Bundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template if isinstance(template, str) else None,
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        stop_token_ids=_stop_ids(tokenizer, [] if eos is None else [eos]),
        add_bos=values.get("tokenizer.ggml.add_bos_token") is True,
        context_tokens=_positive("context_length", context),
        page_size=page_size,
        vocab_size=len(tokens),
        labels=tuple(labels),
    )


def _token_id(values: Mapping[str, object], key: str, tokens: Sequence[str]) -> int | None:
    found = values.get(key)
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < len(tokens):
        raise _refuse(
            key,
            found=repr(found),
            allowed=f"0 … {len(tokens) - 1}",
            remedy="convert or pull the file again",
        )
    return found


def _stop_ids(tokenizer: Tokenizer, named: Sequence[int]) -> tuple[int, ...]:
    """The ids the checkpoint names as its end, then every special token that always is one."""
    specials = {
        added.content: index
        for index, added in tokenizer.get_added_tokens_decoder().items()
        if added.special
    }
    known = [specials[text] for text in END_TEXTS if text in specials]
    return tuple(dict.fromkeys([*named, *known]))


def _positive(field: str, found: object) -> int:
    if not isinstance(found, int) or found <= 0:
        raise _refuse(
            field,
            found=repr(found),
            allowed="a positive number of tokens",
            remedy="convert the checkpoint again, or name a model of the catalogue",
        )
    return found


# --- Hugging Face folder ------------------------------------------------------------------------


def folder_bundle(
    folder: Path, *, context_tokens: int | None, page_size: int, labels: Sequence[str]
) -> Bundle:
    """The bundle of a folder with config.json and tokenizer.json."""
    source = folder / "tokenizer.json"
    try:
        tokenizer_json = source.read_bytes()
        tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # OSError, UnicodeError, or the library's bare Exception
        raise _refuse(
            f"{folder.name}/tokenizer.json",
            found=str(error),
            allowed="a Hugging Face tokenizers file",
            remedy="save one: AutoTokenizer.from_pretrained(…).save_pretrained(folder)",
        ) from error
    config = _json(folder / "config.json", required=True)
    settings = _json(folder / "tokenizer_config.json")
    generation = _json(folder / "generation_config.json")
    bos, eos = (_token_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    named = [
        *_ids(generation.get("eos_token_id")),
        *_ids(config.get("eos_token_id")),
        *([] if eos is None else _ids(tokenizer.token_to_id(eos))),
    ]
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    probe = tokenizer.encode("a").ids
    return Bundle(
        tokenizer_json=tokenizer_json,
        chat_template=_folder_template(folder, settings),
        bos_token=bos,
        eos_token=eos,
        stop_token_ids=_stop_ids(tokenizer, named),
        add_bos=bos_id is not None and probe[:1] == [bos_id],
        context_tokens=_positive(
            "max_position_embeddings", context_tokens or config.get("max_position_embeddings")
        ),
        page_size=page_size,
        vocab_size=_positive("vocab_size", config.get("vocab_size") or tokenizer.get_vocab_size()),
        labels=tuple(labels),
    )


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


def _token_text(found: object) -> str | None:
    """A token is written as its text or as an object with `content`."""
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else None


def _ids(found: object) -> list[int]:
    values = found if isinstance(found, list) else [found]
    return [value for value in values if isinstance(value, int)]


def _folder_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


# --- on disk ------------------------------------------------------------------------------------


def load_bundle(
    path: Path,
    cache: Path,
    *,
    source_digest: str,
    context_tokens: int | None,
    page_size: int,
    labels: Sequence[str],
) -> tuple[Path, bytes]:
    """(file, encoded bundle) of a checkpoint (.gguf file or folder), built once for each digest.

    source_digest names what the bundle is made of; building takes a second or two, a hit
    milliseconds. Raises NodeError where the checkpoint gives no bundle or the folder takes none.
    """
    recipe = repr((BUILDER_VERSION, source_digest, context_tokens, page_size, tuple(labels)))
    target = cache / f"{sha256(recipe.encode()).hexdigest()[:32]}.bundle"
    encoded = _read_cached(target)
    if encoded is not None:
        return target, encoded
    make = folder_bundle if path.is_dir() else _file_bundle
    encoded = encode_bundle(
        make(path, context_tokens=context_tokens, page_size=page_size, labels=labels)
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
