"""A tokenizer bundle of bytes and a few special tokens, made in memory."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from policies.contract.bundle import Bundle

SPECIALS = ("<|im_start|>", "<|im_end|>")


def small_bundle(*, context_tokens: int = 4096) -> Bundle:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return Bundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=None,
        bos_token=None,
        eos_token=SPECIALS[1],
        stop_token_ids=(tokenizer.token_to_id(SPECIALS[1]),),
        add_bos=False,
        context_tokens=context_tokens,
        page_size=16,
        vocab_size=tokenizer.get_vocab_size(),
    )


def encode(bundle: Bundle, text: str) -> list[int]:
    return Tokenizer.from_buffer(bundle.tokenizer_json).encode(text).ids


def decode(bundle: Bundle, ids: list[int]) -> str:
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    return tokenizer.decode(ids, skip_special_tokens=False)
