"""`python -m node_agent …` runs a node; `python -m node_agent models …` answers about models."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["models"]:
        from node_agent.models_command import models_main

        return models_main(argv[1:])
    from node_agent.app import run_node
    from node_agent.config import parse_config
    from node_agent.errors import NodeError
    from node_agent.logs import configure_logs

    configure_logs(process="node_agent")
    try:
        config = parse_config(argv)
    except NodeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return run_node(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
