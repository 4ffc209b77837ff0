"""The tokenizer of a GGUF vocabulary, by llama.cpp's rules (src/llama-vocab.cpp).

`gpt2`: byte-level BPE; `tokenizer.ggml.pre` names the patterns that cut text before merging.
`llama`: SentencePiece merging. Of all neighbours that join to a token the pair with the best score
joins first, then the leftmost; characters without a token become byte tokens; spaces are `▁`.
In both, control and user-defined tokens are found in the raw text first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.execute.weights.facts import MAX_VOCAB
from node_agent.errors import NodeError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Of SentencePiece: work grows with the square of a token's length, and memory with the merges.
MAX_TOKEN_CHARS = 512  # Gemma's longest has 31
MAX_MERGES = 1 << 21  # Gemma's 262,144 tokens have 514,906

DAMAGED = "convert or pull the file again"
OTHER_RULES = "serve the model's Hugging Face folder, which brings its tokenizer.json"


@dataclass(frozen=True, slots=True)
class PreRule:
    """How text is cut before BPE: each pattern cuts what the patterns before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is that token, whatever its merges say
    add_bos: bool = False  # unless the file says


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _by_digits(digits: str) -> str:
    """The newer pattern: a word takes one leading sign, signs take the newlines after them."""
    return (
        r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = PreRule((_by_digits(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreRule((_by_digits(r"\p{N}"),))
PRE_RULES = {
    "smollm": PreRule((r"\p{N}", _GPT2)),
    "gpt-2": PreRule((_GPT2,)),
    "default": PreRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A GGUF vocabulary as the file has it, checked."""

    kind: str  # 'gpt2' or 'llama'
    pre: str
    tokens: list[str]
    types: list[int]
    add_bos: bool
    add_space_prefix: bool
    bos_id: int | None
    eos_id: int | None
    end_ids: tuple[int, ...]  # eos, end of turn, end of message

    def by_type(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]


def refuse(field: str, *, found: str, allowed: str, remedy: str = DAMAGED) -> NodeError:
    return NodeError(f"tokenizer: {field}", found=found, allowed=allowed, remedy=remedy)


def read_vocabulary(values: Mapping[str, object]) -> Vocabulary:
    """Raises NodeError on a damaged vocabulary and on rules that are not known here."""
    kind = values.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise refuse(
            "tokenizer.ggml.model",
            found=repr(kind),
            allowed="'gpt2' (byte-level BPE) or 'llama' (SentencePiece)",
            remedy=OTHER_RULES,
        )
    pre = str(values.get("tokenizer.ggml.pre") or "default")
    if kind == "gpt2" and pre not in PRE_RULES:
        raise refuse(
            "tokenizer.ggml.pre",
            found=repr(pre),
            allowed=", ".join(map(repr, PRE_RULES)),
            remedy=OTHER_RULES,
        )
    tokens = strings(values, "tokenizer.ggml.tokens")
    if len(tokens) > MAX_VOCAB:
        raise refuse(
            "tokenizer.ggml.tokens", found=f"{len(tokens)} tokens", allowed=f"at most {MAX_VOCAB}"
        )
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        raise refuse(
            "tokenizer.ggml.tokens",
            found=f"{len(tokens) - len(set(tokens))} tokens that occur twice",
            allowed="tokens that differ",
        )
    types = values.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise refuse(
            "tokenizer.ggml.token_type",
            found="absent or of another length",
            allowed=f"{len(tokens)} integers, one a token",
        )
    bos, eos, eot, eom = (
        _token_id(values, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom")
    )
    if kind == "llama":  # the ids that a SentencePiece file need not name
        bos = 1 if bos is None and len(tokens) > 2 else bos
        eos = 2 if eos is None and len(tokens) > 2 else eos
    add_bos = values.get("tokenizer.ggml.add_bos_token")
    add_space = values.get("tokenizer.ggml.add_space_prefix")
    return Vocabulary(
        kind=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        add_bos=add_bos if isinstance(add_bos, bool) else kind == "llama" or PRE_RULES[pre].add_bos,
        add_space_prefix=add_space if isinstance(add_space, bool) else kind == "llama",
        bos_id=bos,
        eos_id=eos,
        end_ids=tuple(index for index in (eos, eot, eom) if index is not None),
    )


def strings(values: Mapping[str, object], key: str) -> list[str]:
    found = values.get(key)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise refuse(key, found=type(found).__name__, allowed="an array of strings")
    return found


def _token_id(values: Mapping[str, object], key: str, num_tokens: int) -> int | None:
    found = values.get(key)
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < num_tokens:
        raise refuse(key, found=repr(found), allowed=f"0 … {num_tokens - 1}")
    return found


def gguf_tokenizer(vocabulary: Vocabulary, values: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of a GGUF vocabulary. Raises NodeError."""
    make = _byte_level if vocabulary.kind == "gpt2" else _sentencepiece
    tokenizer = make(vocabulary, values)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in vocabulary.by_type(CONTROL, UNKNOWN)
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token in vocabulary.by_type(USER_DEFINED)
        ]
    )
    return tokenizer


def _byte_level(vocabulary: Vocabulary, values: Mapping[str, object]) -> Tokenizer:
    rule = PRE_RULES[vocabulary.pre]
    merges = [_merge(merge) for merge in strings(values, "tokenizer.ggml.merges")]
    tokenizer = _bpe(
        vocabulary, merges, field="tokenizer.ggml.merges", ignore_merges=rule.ignore_merges
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    return left, right


def _sentencepiece(vocabulary: Vocabulary, values: Mapping[str, object]) -> Tokenizer:
    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise refuse(
            "tokenizer.ggml.scores",
            found="absent or of another length",
            allowed=f"{len(vocabulary.tokens)} numbers, one a token",
        )
    if not all(isinstance(score, int | float) and score == score for score in scores):
        raise refuse(
            "tokenizer.ggml.scores", found="an entry that is no number", allowed="numbers alone"
        )
    longest = max(map(len, vocabulary.tokens), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise refuse(
            "tokenizer.ggml.tokens",
            found=f"a token of {longest} characters",
            allowed=f"at most {MAX_TOKEN_CHARS}",
        )
    known = set(vocabulary.tokens)
    absent = [token for token in BYTES if token not in known]
    if absent:
        raise refuse(
            "tokenizer.ggml.tokens",
            found=f"no token {absent[0]}",
            allowed="a token for each of the 256 bytes",
        )
    merges = _merges_by_score(vocabulary.tokens, scores)
    tokenizer = _bpe(vocabulary, merges, field="tokenizer.ggml.scores", byte_fallback=True)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    undo: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if vocabulary.add_space_prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, the best score first.

    Pairs that join to the same token stand with the shorter left part first, which is the leftmost
    where two of them overlap in the text.
    """
    known = set(tokens)
    pairs: list[tuple[float, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                pairs.append((-score, cut, left, right))
        if len(pairs) > MAX_MERGES:
            raise refuse(
                "tokenizer.ggml.tokens",
                found=f"more than {MAX_MERGES} pairs that join to a token",
                allowed=f"at most {MAX_MERGES}",
            )
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def _bpe(
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    *,
    field: str,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        return Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=merges,
                ignore_merges=ignore_merges,
                byte_fallback=byte_fallback,
            )
        )
    except Exception as error:  # the library raises bare Exception on a merge of unknown tokens
        raise refuse(field, found=str(error), allowed="pairs of known tokens") from error
