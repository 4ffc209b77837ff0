"""`python -m gateway`: flags over file over defaults, then serve; stage lines on stdout."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import structlog
import uvloop

from gateway.app import run
from gateway.config import ConfigError, load
from gateway.ledger.files import LedgerError
from gateway.ledger.keys import KeyRefused
from gateway.telemetry import log_to_stderr
from gateway.upstreams.settings import Dialect
from policies.pairing import SplitMode
from policies.pricing import PriceError
from policies.routing import RoutingPolicy

FLAGS = {  # flag's destination → the setting it is
    "home": "home",
    "host": "server.host",
    "port": "server.port",
    "link_host": "server.link_host",
    "link_port": "server.link_port",
    "admin_host": "server.admin_host",
    "admin_port": "server.admin_port",
    "drain_s": "server.drain_s",
    "api_key_file": "keys.api_key_file",
    "join_token_file": "keys.join_token_file",
    "models": "models.default",
    "prices_file": "models.prices_file",
    "region": "region.name",
    "routing": "routing.policy",
    "split": "routing.split",
}


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="kagari gateway", description="Serve the API, the link and the admin listener."
    )
    flags.add_argument("--config", type=Path, metavar="FILE", help="TOML file; see docs")
    flags.add_argument("--home", metavar="DIR", help="state; default KAGARI_HOME")
    flags.add_argument("--host", metavar="ADDR", help="address of the API (127.0.0.1)")
    flags.add_argument("--port", type=int, help="API port (8000; 0 takes a free one)")
    flags.add_argument("--link-host", metavar="ADDR", help="address nodes dial (as --host)")
    flags.add_argument("--link-port", type=int, help="port nodes dial (8001)")
    flags.add_argument("--admin-host", metavar="ADDR", help="admin address (127.0.0.1)")
    flags.add_argument("--admin-port", type=int, help="admin port (8002)")
    flags.add_argument("--drain-s", type=float, help="seconds to finish what runs (20)")
    flags.add_argument("--api-key", action="append", default=[], help="a key to accept; repeatable")
    flags.add_argument("--api-key-file", metavar="FILE", help="a file with such a key")
    flags.add_argument("--join-token-file", metavar="FILE", help="default home/join.token")
    flags.add_argument("--model", "--models", dest="models", nargs="+", action="extend")
    flags.add_argument("--prices-file", metavar="FILE", help="price table (the shipped one)")
    flags.add_argument("--region", help="this gateway's region (local)")
    flags.add_argument(
        "--upstream", action="append", metavar="URL", help="a foreign server; repeat"
    )
    flags.add_argument("--dialect", choices=get_args(Dialect), help="of each of them (openai)")
    flags.add_argument("--tokenizer", metavar="DIR", help="tokenizer files of their model")
    flags.add_argument("--routing", choices=[policy.value for policy in RoutingPolicy])
    flags.add_argument("--split", choices=[mode.value for mode in SplitMode])
    return flags


def named_upstreams(options: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """The tables that --upstream, --dialect and --tokenizer stand for. Raises ConfigError."""
    same = {name: options[name] for name in ("dialect", "tokenizer") if options[name] is not None}
    if options["upstream"] is None:
        if same:
            raise ConfigError(
                f"--{next(iter(same))}", "no --upstream", "--upstream too", "Name the server's URL."
            )
        return None
    return [{"url": url, **same} for url in options["upstream"]]


def emit(line: dict[str, object]) -> None:
    """One JSON object a line; who closed our standard output wants no more of them."""
    try:
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        structlog.get_logger("kagari.gateway").warning("stdout_closed")


def main(arguments: list[str] | None = None) -> int:
    """2: a setting is wrong; 1: it could not start or end cleanly; 0: drained."""
    options = vars(parser().parse_args(arguments))
    try:
        loaded = load(
            options["config"],
            flags={setting: options[flag] for flag, setting in FLAGS.items()}
            | {"upstreams": named_upstreams(options)},
        )
        log_to_stderr()
        uvloop.run(run(loaded.config, api_keys=tuple(options["api_key"]), emit=emit))
    except (ConfigError, KeyRefused, PriceError) as error:
        sys.stderr.write(f"kagari gateway: {error}\n")
        return 2
    except (OSError, LedgerError) as error:
        sys.stderr.write(f"kagari gateway: {error}\n")
        return 1
    except asyncio.CancelledError:
        return 1  # a second signal: ended at once
    return 0


if __name__ == "__main__":
    sys.exit(main())
