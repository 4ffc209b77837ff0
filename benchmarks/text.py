"""Text at the gateway against the plain way: a warm turn and the whole encode, decoder and library.

Run `python -m benchmarks.text [--quick] [--json FILE] [--bundle FILE]`. Without a bundle file the
default model's is asked of the node agent. Both sides alternate in one run; figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics  # 700 KB of English and code in every Python

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gateway.text.model import TextModel
from gateway.text.template import ChatTemplate
from policies.contract import page_keys, wire
from policies.contract.bundle import Bundle, decode_bundle

ROOT = bytes(32)
MIXED = (
    "Grüße aus Köln, où l'été est là. Привет! 日本語の文章です。 한국어 문장입니다. "
    "مرحبا بالعالم 🙂👍🏽👩\u200d👩\u200d👧 "
)
Message = dict[str, object]
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the repetitions")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--bundle", type=Path, help="an encoded tokenizer bundle")
    options = parser.parse_args()
    bundle = decode_bundle((options.bundle or default_bundle()).read_bytes())
    rows: list[Row] = []
    for row in asyncio.run(measure(bundle, times=8 if options.quick else 40)):
        rows.append(row)
        print(
            f"{row['name']:<22}{row['ours']:>10.2f}{row['peer']:>10.2f} {row['unit']:<9}"
            f"{row['ratio']:>8.1f}x  against {row['peer_name']}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def default_bundle() -> Path:
    command = [sys.executable, "-m", "node_agent", "models", "spec", "smollm2-135m", "--json"]
    answer = subprocess.run(command, check=True, capture_output=True, timeout=120)
    return Path(json.loads(answer.stdout)["bundle_path"])


async def measure(bundle: Bundle, *, times: int) -> list[Row]:
    model = TextModel.load(bundle)
    full = Tokenizer.from_buffer(bundle.tokenizer_json)
    template = ChatTemplate(
        bundle.chat_template or "", bos_token=bundle.bos_token, eos_token=bundle.eos_token
    )

    async def ours(messages: list[Message]) -> array[int]:
        ids = await model.chat_prompt(messages)
        model.page_keys(ROOT, ids)
        return ids

    async def whole(messages: list[Message]) -> array[int]:
        rendered = template.render(messages)
        encoding = full.encode_batch_fast([rendered], add_special_tokens=False)[0]
        ids = array("I", encoding.ids)
        page_keys.page_keys(ROOT, wire.pack_ids(ids), page_size=bundle.page_size)
        return ids

    text = corpus()
    rows = [
        await prompt_row("turn_32k_200_new", ours, whole, growing(text, times), times=times),
        *[
            await prompt_row(name, ours, whole, same(text, num, chars), times=times * 2)
            for name, num, chars in (
                ("request_1kb_warm", 2, 500),
                ("request_8kb_warm", 8, 1_000),
                ("request_120kb_warm", 1, 120_000),
            )
        ],
    ]
    plain = "".join(itertools.islice(text, 40))
    for name, sample, at_once in (
        ("decode_1", plain, 1),
        ("decode_16", plain, 16),
        ("decode_mixed_1", MIXED * 200, 1),
        ("decode_mixed_16", MIXED * 200, 16),
    ):
        ids = full.encode(sample, add_special_tokens=False).ids[:20_000]
        rows.append(decode_row(name, model, full, ids, at_once=at_once, times=max(3, times // 4)))
    rows.append(stops_row(model, full.encode(plain, add_special_tokens=False).ids[:20_000]))
    return rows


def corpus() -> Iterator[str]:
    """Topics of the language reference, without end; later rounds differ from the first."""
    for count in itertools.count():
        for name, topic in sorted(topics.items()):
            yield f"{topic}\n{name} {count}\n"


def cut(text: Iterator[str], chars: int) -> str:
    taken = ""
    while len(taken) < chars:
        taken += next(text)
    return taken[:chars]


def same(text: Iterator[str], num_messages: int, chars: int) -> Iterator[list[Message]]:
    messages: list[Message] = [
        {"role": ("user", "assistant")[place % 2], "content": cut(text, chars)}
        for place in range(num_messages)
    ]
    return itertools.repeat(messages)


def growing(text: Iterator[str], turns: int) -> Iterator[list[Message]]:
    """A conversation of about 32k tokens that gains about 200 (an answer, a question) each turn."""
    messages = list(next(same(text, 55, 2_500)))
    for _ in range(turns + 1):
        messages += next(same(text, 2, 430))
        yield list(messages)


async def prompt_row(
    name: str,
    ours: Callable[[list[Message]], Awaitable[array[int]]],
    whole: Callable[[list[Message]], Awaitable[array[int]]],
    turns: Iterator[list[Message]],
    *,
    times: int,
) -> Row:
    first = next(turns)
    assert await ours(first) == await whole(first)
    seconds: tuple[list[float], list[float]] = ([], [])
    for messages in itertools.islice(turns, times):
        prompts = []
        for way, spent in zip((ours, whole), seconds, strict=True):
            started = time.perf_counter()
            prompts.append(await way(messages))
            spent.append(time.perf_counter() - started)
        assert prompts[0] == prompts[1]
    mine, theirs = (statistics.median(spent) * 1e6 for spent in seconds)
    return as_row(name, mine, theirs, "whole encode and key chain", "us")


def decode_row(
    name: str, model: TextModel, full: Tokenizer, ids: list[int], *, at_once: int, times: int
) -> Row:
    chunks = [ids[start : start + at_once] for start in range(0, len(ids), at_once)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        started = time.perf_counter()
        output = model.output([])
        mine = [output.push(chunk) for chunk in chunks]
        seconds[0].append(time.perf_counter() - started)
        started = time.perf_counter()
        stream = DecodeStream(skip_special_tokens=True)
        theirs = ["".join([stream.step(full, token) or "" for token in chunk]) for chunk in chunks]
        seconds[1].append(time.perf_counter() - started)
        # DecodeStream may still hold the last characters; until then they agree.
        assert "".join(mine).startswith("".join(theirs))
    mine_us, theirs_us = (statistics.median(spent) / len(ids) * 1e6 for spent in seconds)
    return as_row(name, mine_us, theirs_us, "DecodeStream", "us/token")


def stops_row(model: TextModel, ids: list[int]) -> Row:
    output = model.output(["\n\nUser:", "<END>", "###", "Observation:"])
    started = time.perf_counter()
    num_tokens = 0
    for token in ids:
        output.push((token,))
        num_tokens += 1
        if output.stopped_at is not None:
            break
    spent = (time.perf_counter() - started) / num_tokens * 1e6
    return as_row("decode_1_four_stops", spent, 4.0, "the budget", "us/token")


def as_row(name: str, ours: float, peer: float, peer_name: str, unit: str) -> Row:
    return {
        "name": name,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "unit": unit,
        "ratio": peer / ours,
    }


if __name__ == "__main__":
    main()
