"""All the text of one served model: prompts in, page keys, output text, from its bundle alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakValueDictionary

from gateway.text.detokenize import Detokenizer
from gateway.text.errors import BundleError, TextError
from gateway.text.guard import Guard
from gateway.text.key_memo import KeyMemo
from gateway.text.messages import prepare, prepare_tools
from gateway.text.output import OutputText
from gateway.text.template import ChatTemplate
from gateway.text.tokenize import PromptTokenizer
from gateway.text.tool_calls import CLOSE, OPEN, PARSERS, ToolCallParser
from policies.contract import wire
from policies.contract.bundle import Bundle, tokenizer_digest

# Models with the same tokenizer share it, its check and its segments; the last one takes it along.
_tokenizer_by_digest: WeakValueDictionary[str, PromptTokenizer] = WeakValueDictionary()


class TextModel:
    """Built once per bundle; used from one event loop."""

    @classmethod
    def load(cls, bundle: Bundle) -> TextModel:
        """Raises BundleError. Takes about a second per new tokenizer: call it in a thread."""
        return cls(bundle)

    def __init__(self, bundle: Bundle) -> None:
        self.context_tokens = bundle.context_tokens
        self.stop_token_ids = bundle.stop_token_ids
        self.page_size = bundle.page_size
        self.vocab_size = bundle.vocab_size
        self.parser_family = bundle.parser_family if bundle.parser_family in PARSERS else None
        self.tokenizer_digest = tokenizer_digest(bundle.tokenizer_json)
        tokenizer = _tokenizer_by_digest.get(self.tokenizer_digest)
        if tokenizer is None:
            tokenizer = PromptTokenizer(bundle.tokenizer_json)
            _tokenizer_by_digest[self.tokenizer_digest] = tokenizer
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer.full,
            bundle.stop_token_ids,
            shown=(OPEN, CLOSE) if self.parser_family is not None else (),
        )
        self._max_chars = bundle.context_tokens * self._detokenizer.longest_token_bytes
        self._keys = KeyMemo(page_size=bundle.page_size)
        self._bos = self._bos_ids(bundle)
        self._template: ChatTemplate | None = None
        self._assistant_guard = tokenizer.guard
        if bundle.chat_template is not None:
            self._template = ChatTemplate(
                bundle.chat_template, bos_token=bundle.bos_token, eos_token=bundle.eos_token
            )
            self._assistant_guard = self._guard_for_assistant(self._template)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> array[int]:
        """Token ids (typecode 'I') of the whole conversation, up to where the assistant speaks.

        Tools are function definitions, for a model that has a parser_family. The prompt is made
        from the text given alone: ids once generated are never used. Raises TextError.
        """
        if self._template is None:
            raise TextError(
                "messages",
                found="a model without a chat template",
                allowed="chat with models that have one",
                remedy="use /v1/completions or a model with a template",
                code="no_chat_template",
            )
        if tools and self.parser_family is None:
            raise TextError(
                "tools",
                found=f"{len(tools)} tools and a model whose template knows none",
                allowed='no tools, or tool_choice "none"',
                remedy="use a model that /v1/models lists with tools, or leave tools out",
                code="unsupported",
            )
        prepared = prepare(
            messages,
            guard=self._tokenizer.guard,
            assistant_guard=self._assistant_guard,
            keep_developer=self._template.names_developer,
        )
        rendered = self._template.render(
            prepared,
            prepare_tools(tools, self._tokenizer.guard),
            add_generation_prompt=add_generation_prompt,
        )
        self._check_length(rendered, "messages")
        return await self._tokenizer.encode(rendered)

    async def raw_prompt(self, text: str, *, with_bos: bool = True) -> array[int]:
        """Token ids (typecode 'I') of text as it stands, after bos where the model wants it."""
        self._check_length(text, "prompt")
        ids = await self._tokenizer.encode_text(text)
        return self._bos + ids if with_bos else ids

    def page_keys(self, root: bytes, ids: array[int]) -> list[bytes]:
        """Keys of all full pages of ids; the next turn of a conversation costs its new pages."""
        return self._keys.page_keys(root, wire.pack_ids(ids))

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens as text."""
        return self._detokenizer.text_of(ids)

    def token_texts(self, ids: Sequence[int]) -> list[str | None]:
        """Each token as the vocabulary writes it; None for an id that only pads it."""
        return [self._tokenizer.full.id_to_token(token_id) for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself; of a special one its name."""
        return self._detokenizer.token_bytes(token_id)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id, special tokens as text."""
        return self._detokenizer.pieces(ids)

    def output(
        self, stops: Sequence[str], *, min_tokens: int = 0, with_places: bool = False
    ) -> OutputText:
        """For one stream, see OutputText. Raises ValueError on an empty stop string."""
        stream = self._detokenizer.stream()
        return OutputText(stream, stops, min_tokens=min_tokens, with_places=with_places)

    def tool_calls(self, draw_id: Callable[[], str]) -> ToolCallParser:
        """For one stream of a model with a parser_family; draw_id gives each call its id."""
        assert self.parser_family is not None, "tools were refused"
        return PARSERS[self.parser_family](draw_id)

    def _check_length(self, text: str, field: str) -> None:
        """Refuses before tokenising what cannot fit even in the longest tokens there are."""
        if len(text) > self._max_chars:
            raise TextError(
                field,
                found=f"{len(text)} characters",
                allowed=f"at most {self.context_tokens} tokens",
                remedy="shorten the prompt",
                code="context_length_exceeded",
            )

    def _bos_ids(self, bundle: Bundle) -> array[int]:
        if not bundle.add_bos:
            return array("I")
        token_id = self._tokenizer.full.token_to_id(bundle.bos_token or "")
        if token_id is None:
            raise BundleError(
                f"add_bos: found bos_token {bundle.bos_token!r}, which is no token of the tokenizer"
            )
        return array("I", [token_id])

    def _guard_for_assistant(self, template: ChatTemplate) -> Guard:
        """Leaves alone what the template itself looks for in earlier answers, such as `</think>`.

        Only tokens that are not special: those cannot open or close a turn.
        """
        searched = {text.strip() for text in template.searched}
        return Guard(
            token.text
            for token in self._tokenizer.control
            if token.special or token.text not in searched
        )
