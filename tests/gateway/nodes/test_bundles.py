"""Loading bundles: what a hostile tokenizer does to the thread, and to the gateway."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import Tokenizer

from gateway.nodes.bundles import Bundles
from gateway.text.model import TextModel
from policies.contract.bundle import Bundle, bundle_digest, encode_bundle

PANICS = b"""{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [],
"version": "1.0"}"""


def bundle(tokenizer_json: bytes) -> Bundle:
    return Bundle(
        tokenizer_json=tokenizer_json,
        chat_template=None,
        bos_token=None,
        eos_token=None,
        stop_token_ids=(),
        add_bos=False,
        context_tokens=64,
        page_size=16,
        vocab_size=1,
        labels=(),
    )


def test_a_tokenizer_that_panics_refuses_its_bundle_and_ends_nothing() -> None:
    with pytest.raises(BaseException, match="charsmap") as caught:
        Tokenizer.from_str(PANICS.decode())
    assert not isinstance(caught.value, Exception)

    async def problem() -> str:
        bundles = Bundles(TextModel.load)
        encoded = encode_bundle(bundle(PANICS))
        digest = bundle_digest(encoded)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(bundles.run())
            bundles.add(digest, encoded)
            while digest not in bundles.problem_by_digest:  # noqa: ASYNC110  it tells nobody
                await asyncio.sleep(0.01)
            running.cancel()
        return bundles.problem_by_digest[digest]

    assert "panicked" in asyncio.run(problem())
