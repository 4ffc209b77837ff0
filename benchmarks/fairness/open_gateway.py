"""A gateway that gives an engine all that comes at once, as one without a queue of its own does."""

from __future__ import annotations

import sys

from gateway.__main__ import main
from policies import queue

EVERYTHING = 1 << 20  # budgets that an engine is given

if __name__ == "__main__":
    queue.BUDGETS = EVERYTHING
    sys.exit(main())
