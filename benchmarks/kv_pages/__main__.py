"""Pages of bf16, int8 and fp8 beside each other, in one process on the same weights.

Rows: `fit/…` tokens that fit in a gigabyte; `turns_N/…` generated tokens per second of N
conversations of 1,500 tokens that go on turn by turn, at equal bytes of pages; `crossover/…` the
best of their ratios, and from how many on they are quicker; `divergence/…` nats from fp32 pages
over Python's documentation (pydoc_data.topics: the language reference's topics). `peer` is bf16.
`python -m benchmarks.kv_pages [--quick] [--json FILE] [--model PATH] [--threads N]
[--only fit|turns|divergence]`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.beside import Beside, compared
from engine.store.page_codec import QUANTISED, PageLayout

GIGABYTE = 1e9
PARTS = ("fit", "turns", "divergence")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer conversations and tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file or a folder")
    parser.add_argument("--threads", type=int, default=None, help="default: all cores")
    parser.add_argument("--only", default="", choices=PARTS, help="rows of this kind")
    options = parser.parse_args(arguments)
    models = Path(os.environ.get("KAGARI_MODELS", "~/.cache/kagari/models")).expanduser()
    options.model = options.model or models / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not options.model.exists():
        parser.error(f"{options.model} is absent: run `kagari models pull smollm2-135m`")
    return options


def fit_rows(layout: PageLayout) -> list[Beside]:
    def tokens(precision: str) -> float:
        pages = GIGABYTE // replace(layout, precision=precision).page_bytes
        return pages * layout.page_size

    return [
        compared(
            f"fit/{precision}",
            tokens(precision),
            {"bf16": tokens("bf16")},
            "tokens",
            more_is_better=True,
            detail="in 1 GB of pages, scales counted",
        )
        for precision in QUANTISED
    ]


def main() -> None:
    options = parse(sys.argv[1:])
    from benchmarks.kv_pages import divergence, turns

    results: list[Beside] = []

    def add(row: Beside) -> None:
        results.append(row)
        print(f"{row}\n  {row.detail}", file=sys.stderr, flush=True)

    layout = turns.layout_of(options.model)
    flags = {"quick": options.quick, "threads": options.threads}
    parts = {
        "fit": lambda: fit_rows(layout),
        "turns": lambda: turns.rows(options.model, layout, **flags),
        "divergence": lambda: divergence.rows(options.model, **flags),
    }
    for name, rows in parts.items():
        for row in rows() if options.only in ("", name) else ():
            add(row)
    told = json.dumps([told for row in results for told in row.rows()], indent=1)
    if options.json:
        options.json.write_text(told + "\n")
    else:
        print(told)


if __name__ == "__main__":
    main()
