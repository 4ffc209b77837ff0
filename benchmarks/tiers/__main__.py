"""Time to first token of a long prefix from each tier beside cold, and what checking costs a step.

`python -m benchmarks.tiers [--quick] [--json FILE] [--model NAME] [--tokens N]
[--only ttft|check]`. Every time to first token is that of an engine process, spoken to as its
agent does; the disk's is after a `kill -9` and a restart without host tier, the cluster's that of a
second engine on a Mooncake Store that is started for it (as root, with the extra `mooncake`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.beside import Beside, absent_rows
from benchmarks.tiers.check_cost import check_rows
from benchmarks.tiers.first_token import first_token_rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prefix")
    parser.add_argument("--only", choices=("ttft", "check"))
    options = parser.parse_args(arguments)
    rows: list[Beside] = []
    absent: dict[str, str] = {}
    if options.only != "check":
        rounds = 1 if options.quick else 3
        rows += first_token_rows(options.model, options.tokens, rounds=rounds, absent=absent)
    if options.only != "ttft":
        rows += check_rows(options.model, steps=60 if options.quick else 400)
    for row in rows:
        print(row, row.detail, flush=True)
    for name, why in absent.items():
        print(f"{name:16} absent: {why}", flush=True)
    if options.json is not None:
        told = [json_row for row in rows for json_row in row.rows()] + absent_rows(absent)
        options.json.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
