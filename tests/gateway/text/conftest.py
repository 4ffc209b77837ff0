"""Tokenizers for text tests: small ones trained here, the default model's from its GGUF file."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from policies.contract.bundle import Bundle

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x"]
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog said: don't!\n\n",
    "def render(messages: list[str]) -> str:\n    return '\\n'.join(messages)\n",
    "<div class='a'>100% of 3,000 = 3000</div>\r\n\ttabs\tand  spaces   here\n",
    "Grüße aus Köln, où l'été est là. 日本語の文章です。 한국어 문장. مرحبا 🙂👍🏽 👩‍👩‍👧",
]


@pytest.fixture(scope="session")
def tiny_json() -> bytes:
    """A byte-level BPE of about 600 tokens with special and non-special added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL]
    )
    return tokenizer.to_str().encode()


@pytest.fixture(scope="session")
def metaspace_json() -> bytes:
    """A Metaspace BPE with byte fallback: neither segments nor byte tables are right for it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPECIAL],
    )
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [
        token for token in parsed["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return json.dumps(parsed).encode()


def bundle_of(
    tokenizer_json: bytes, *, chat_template: str | None = CHATML, add_bos: bool = False
) -> Bundle:
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    return Bundle(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        stop_token_ids=(end,),
        add_bos=add_bos,
        context_tokens=32_768,
        page_size=64,
        vocab_size=tokenizer.get_vocab_size(),
    )


@pytest.fixture(scope="session")
def tiny_bundle(tiny_json: bytes) -> Bundle:
    return bundle_of(tiny_json)


@pytest.fixture(scope="session")
def hermes_bundle(smollm2_bundle: Bundle) -> Bundle:
    """The default model as its catalogue entry serves it: with our template."""
    folder = Path(__file__).parents[3] / "policies" / "defaults" / "templates"
    source = (folder / "smollm2.jinja").read_text()
    return msgspec.structs.replace(smollm2_bundle, chat_template=source, parser_family="hermes")


@pytest.fixture(scope="session")
def metaspace_bundle(metaspace_json: bytes) -> Bundle:
    return bundle_of(metaspace_json)


@pytest.fixture(scope="session")
def smollm2_bundle() -> Bundle:
    """The default model's bundle, read from its GGUF file by the `smollm` rules of llama.cpp."""
    default = Path.home() / ".cache" / "kagari" / "models"
    folder = Path(os.environ.get("KAGARI_MODELS", default))
    file = next(iter(sorted(folder.rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))), None)
    if file is None:
        pytest.fail("the default model is absent; run: kagari models pull smollm2-135m")
    return _read_gguf(file)


def _read_gguf(file: Path) -> Bundle:
    from gguf import GGUFReader

    reader = GGUFReader(file)

    def read(name: str) -> object:
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens = read("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = read("ggml.token_type")
    control = [text for text, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in control]
    )
    end = read("ggml.eos_token_id")
    return Bundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=read("chat_template"),
        bos_token=tokens[read("ggml.bos_token_id")],
        eos_token=tokens[end],
        stop_token_ids=(end,),
        add_bos=False,
        context_tokens=32_768,
        page_size=64,
        vocab_size=len(tokens),
    )
