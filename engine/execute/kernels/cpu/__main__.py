"""`python -m engine.execute.kernels.cpu` compiles the CPU kernels ahead of the first engine."""

from __future__ import annotations

import sys

from engine.config import ConfigError
from engine.execute.kernels.cpu import build, library


def main() -> int:
    try:
        kernels = library.load()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if kernels is None:
        print(f"No CPU kernels, torch serves alone: {library.why_absent()}", file=sys.stderr)
        return 1
    wrong = "".join(f"; {isa} failed its self-check" for isa in kernels.distrusted)
    print(f"{build.library_file()} ({kernels.isa}{wrong})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
