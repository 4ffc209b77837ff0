"""Token ids to text as they come: a character is sent when its last byte is there, never before.

Byte-level tokenizers, and those that fall back to byte tokens (`<0xE2>`), use our own tables,
checked against the library over the whole vocabulary: id → text for tokens that are whole UTF-8,
id → bytes and an incremental UTF-8 decoder for the rest. All others use the library's DecodeStream.
With both, any chunking of a stream gives the same text.
"""

from __future__ import annotations

import random
import re
from codecs import getincrementaldecoder, utf_8_decode
from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CHECK_CHUNK = 64
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # of vocabularies that fall back to bytes


class TextStream(Protocol):
    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def flush(self) -> str:
        """The rest, at the end: unfinished bytes as U+FFFD."""


class Detokenizer:
    """Makes text streams for one tokenizer. `silent` ids produce no text, nor do special tokens.

    `shown` texts do, though special, where there are tables: a parser looks for them.
    """

    def __init__(
        self, tokenizer: Tokenizer, silent: Iterable[int], *, shown: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self._silent = special.union(silent)
        self._tables: ByteTables | None = None
        tables = ByteTables(tokenizer, special)
        if tables.agree_with(tokenizer):
            tables.silence(self._silent)
            for text in shown:
                token_id = tokenizer.token_to_id(text)
                if token_id is not None:
                    tables.texts[token_id] = text
            self._tables = tables

        # Decoders strip a leading space: some token in front keeps the next one's.
        self._before = tokenizer.encode("a", add_special_tokens=False).ids
        self.longest_token_bytes = max(map(len, map(str.encode, tokenizer.get_vocab())), default=1)

    @property
    def has_tables(self) -> bool:
        return self._tables is not None

    def stream(self) -> TextStream:
        if self._tables is not None:
            return ByteStream(self._tables)
        return LibraryStream(self._tokenizer, self._silent)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself, in the middle of a text; of a special one its name."""
        if self._tables is not None and 0 <= token_id < len(self._tables.texts):
            text = self._tables.texts[token_id]
            if text is None:
                return self._tables.partial[token_id]
            if text:
                return text.encode()
        name: str | None = self._tokenizer.id_to_token(token_id)
        if name is None:  # the vocabulary is padded
            return b""
        if self._tables is not None or token_id in self._silent:
            return name.encode()
        byte = BYTE_TOKEN.fullmatch(name)
        if byte is not None:
            return bytes.fromhex(byte[1])
        text = self._tokenizer.decode([*self._before, token_id])
        return text.removeprefix(self._tokenizer.decode(self._before)).encode()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each id; a character's is with the id that completes it."""
        decoder = getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self.token_bytes(token_id)) for token_id in ids]
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def text_of(self, ids: Sequence[int]) -> str:
        """The whole text, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class ByteTables:
    """What each token id means: `texts[id]`, or None where only `partial[id]`, its bytes, exist."""

    def __init__(self, tokenizer: Tokenizer, special: Iterable[int]) -> None:
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._falls_back = "ByteFallback" in repr(tokenizer.decoder)
        bytes_of = _fallback_bytes if self._falls_back else _byte_level_bytes
        self.texts: list[str | None] = [""] * (max(vocab.values(), default=-1) + 1)
        self.partial: dict[int, bytes] = {}
        for token, token_id in vocab.items():
            raw = bytes_of(token)
            try:
                self.texts[token_id] = raw.decode()
            except UnicodeDecodeError:
                self.texts[token_id] = None
                self.partial[token_id] = raw
        self.silence(special)

    def silence(self, ids: Iterable[int]) -> None:
        for token_id in ids:
            if 0 <= token_id < len(self.texts):
                self.texts[token_id] = ""

    def agree_with(self, tokenizer: Tokenizer) -> bool:
        """Whether every token, in an order that joins odd neighbours, decodes as the library's."""
        chunks = self._characters() if self._falls_back else self._neighbours()
        for chunk, text in zip(chunks, tokenizer.decode_batch(chunks), strict=True):
            stream = ByteStream(self)
            if stream.push(chunk) + stream.flush() != text:
                return False
        return True

    def _neighbours(self) -> list[list[int]]:
        ids = list(range(len(self.texts)))
        random.Random(0).shuffle(ids)
        return [ids[start : start + CHECK_CHUNK] for start in range(0, len(ids), CHECK_CHUNK)]

    def _characters(self) -> list[list[int]]:
        """Where bytes are tokens: only whole characters, since of a run of bytes that is no UTF-8
        the library loses the good ones too. And a letter first: it takes away a space that begins
        a text, but what a model says goes on from its prompt.
        """
        id_by_byte = {raw[0]: token_id for token_id, raw in self.partial.items() if len(raw) == 1}
        whole = [[token_id] for token_id, text in enumerate(self.texts) if text is not None]
        whole += [
            [id_by_byte[byte] for byte in character.encode()]
            for character in "é߿日￮🙂"
            if all(byte in id_by_byte for byte in character.encode())
        ]
        letter = next(token_id for token_id, text in enumerate(self.texts) if text and text != " ")
        random.Random(0).shuffle(whole)
        return [
            [letter, *chain.from_iterable(whole[start : start + CHECK_CHUNK])]
            for start in range(0, len(whole), CHECK_CHUNK)
        ]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 is itself, the rest goes on from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_BY_CHAR = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_BY_CHAR[char] for char in token])
    except KeyError:  # an added token with a space, say: the library takes it as it stands
        return token.encode()


def _fallback_bytes(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token) if len(token) == 6 else None
    if byte is not None:
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").encode()


class ByteStream:
    """Text of one stream from byte tables."""

    def __init__(self, tables: ByteTables) -> None:
        self._texts = tables.texts
        self._partial = tables.partial
        self._pending = b""  # the beginning of a character

    def push(self, tokens: Sequence[int]) -> str:
        if self._pending:
            return self._push_bytes(tokens)
        texts = self._texts
        try:
            if len(tokens) == 1:
                text = texts[tokens[0]]
                return self._push_bytes(tokens) if text is None else text
            return "".join([texts[token] for token in tokens])  # type: ignore[misc]
        except (TypeError, IndexError):  # a token that is no whole text, or none of ours
            return self._push_bytes(tokens)

    def _push_bytes(self, tokens: Sequence[int]) -> str:
        texts, partial = self._texts, self._partial
        raw = [self._pending]
        for token in tokens:
            text = texts[token] if 0 <= token < len(texts) else ""
            raw.append(partial[token] if text is None else text.encode())
        data = b"".join(raw)
        decoded, num_bytes = utf_8_decode(data, "replace", False)
        self._pending = data[num_bytes:]
        return decoded

    def flush(self) -> str:
        decoded, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return decoded


class LibraryStream:
    """Text of one stream from the library, for decoders that have no tables."""

    def __init__(self, tokenizer: Tokenizer, silent: Container[int]) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []  # tokens that have not shown in the text yet

    def push(self, tokens: Sequence[int]) -> str:
        pieces: list[str] = []
        for token in tokens:
            if token in self._silent:
                continue
            self._held.append(token)
            piece = self._step(token)
            if piece:
                pieces.append(piece)
                self._held.clear()
        return "".join(pieces)

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception:  # bytes that are no UTF-8 changed, for the library, what was sent before
            self._stream = DecodeStream(ids=self._held, skip_special_tokens=True)
            return self._tokenizer.decode(self._held)

    def flush(self) -> str:
        held, self._held = self._held, []
        return self._tokenizer.decode(held)
