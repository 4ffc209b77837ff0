"""The command line of a node agent, read once into a frozen value."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from msgspec import Struct

from engine.config import ConfigError, check_compute, check_peer, read_peer_port
from node_agent.errors import NodeError
from policies.contract.wire import Role

LINK_PATH = "/link/v1"
MAX_LINKS = 32  # gateways of one node; channels of the engine socket are 1 … 254
MAX_TIER_MB = 1 << 24
# Engine flags that take a value and go to `python -m engine serve` as they are.
ENGINE_FLAGS = (
    "--kv-dtype",
    "--dtype",
    "--compute",
    "--announce",
    "--kv-device-tokens",
    "--device",
    "--step-tokens",
    "--max-running",
    "--overlap",
    "--transfer",
)


class NodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    gateway_urls: tuple[str, ...]
    join_token: str
    models: tuple[str, ...]
    home: Path
    node_id: str | None = None  # None: the persisted one
    role: Role = "mixed"
    script: Path | None = None
    bundle: Path | None = None  # only with script: no checkpoint is needed then
    threads: int | None = None
    engine_flags: tuple[str, ...] = ()
    kv_host_mb: int | None = None  # of each engine; None: node_agent/tiers.py decides
    kv_host_share: Path | None = None  # None: each engine has memory of its own
    kv_disk_mb: int | None = None
    kv_disk_dir: Path | None = None  # None: kv in home
    cluster_store: str | None = None
    peer_host: str = "127.0.0.1"  # where engines of other nodes bring pages
    peer_port: int | None = 0  # of the first engine, the next has the next; 0: free ones
    exit_with_parent: bool = False
    drain_s: float = 20.0
    engine_up_s: float = 600.0


def default_home() -> Path:
    """KAGARI_HOME, or ~/.local/share/kagari."""
    chosen = os.environ.get("KAGARI_HOME")
    return Path(chosen) if chosen else Path.home() / ".local" / "share" / "kagari"


def parse_config(argv: Sequence[str]) -> NodeConfig:
    """Raises NodeError on values that cannot be; argparse exits with 2 on unknown flags."""
    parser = argparse.ArgumentParser(
        prog="python -m node_agent",
        description="Runs the engines of this machine and speaks for them to the gateways.",
        epilog="python -m node_agent models list|pull|show|spec: what can be served",
        allow_abbrev=False,
    )
    parser.add_argument("--gateway", action="append", required=True, metavar="URL")
    parser.add_argument("--join-token")
    parser.add_argument("--join-token-file", type=Path)
    parser.add_argument("--node-id")
    parser.add_argument("--role", choices=get_args(Role), default="mixed")
    parser.add_argument("--model", action="append", metavar="NAME")
    parser.add_argument("--home", type=Path, default=default_home())
    parser.add_argument("--script", type=Path, help="scripted replies instead of a model")
    parser.add_argument("--bundle", type=Path, help="tokenizer bundle for --script")
    parser.add_argument("--threads", type=int, help="CPU threads of each engine")
    parser.add_argument("--drain-s", type=float, default=20.0)
    parser.add_argument("--engine-up-s", type=float, default=600.0)
    parser.add_argument("--exit-with-parent", action="store_true")
    parser.add_argument("--kv-host-mb", type=int, metavar="MB", help="pages in memory, each engine")
    parser.add_argument(
        "--kv-host-share", type=Path, metavar="DIR", help="share it under this name"
    )
    parser.add_argument("--kv-disk-mb", type=int, metavar="MB", help="pages on disk, each engine")
    parser.add_argument("--kv-disk-dir", type=Path, metavar="DIR", help="default: kv in home")
    parser.add_argument("--cluster-store", metavar="URL", help="mooncake://HOST:PORT")
    parser.add_argument(
        "--peer-host",
        default="127.0.0.1",
        metavar="ADDR",
        help="where engines of other nodes bring pages",
    )
    parser.add_argument(
        "--peer-port",
        default="0",
        metavar="PORT",
        help="of the first engine, the next has the next; 0: free ones; none: no part in splits",
    )
    for flag in ENGINE_FLAGS:
        parser.add_argument(flag, metavar="VALUE")
    options = parser.parse_args(argv)
    values = vars(options)
    engine_flags: list[str] = []
    for flag in ENGINE_FLAGS:
        value = values[flag[2:].replace("-", "_")]
        if value is not None:
            engine_flags += [flag, value]
    if options.bundle is not None and options.script is None:
        raise NodeError(
            "--bundle",
            found="a bundle without --script",
            allowed="only together with --script",
            remedy="leave --bundle away: a model brings its own",
        )
    _require_range("--threads", options.threads, 1, 1024)
    _require_range("--drain-s", options.drain_s, 0, 3600)
    _require_range("--engine-up-s", options.engine_up_s, 1, 86400)
    _require_range("--kv-host-mb", options.kv_host_mb, 0, MAX_TIER_MB)
    _require_range("--kv-disk-mb", options.kv_disk_mb, 0, MAX_TIER_MB)
    try:
        peer_port = read_peer_port(options.peer_port)
        check_peer(options.peer_host, peer_port)
        check_compute(options.compute or "exact", options.announce or "auto")
    except ConfigError as error:
        raise NodeError(
            error.field, found=str(error.found), allowed=error.allowed, remedy=error.remedy
        ) from error
    return NodeConfig(
        gateway_urls=_link_urls(options.gateway),
        join_token=_join_token(options.join_token, options.join_token_file),
        models=tuple(dict.fromkeys(options.model or ())),
        home=options.home,
        node_id=_node_id(options.node_id),
        role=options.role,
        script=options.script,
        bundle=options.bundle,
        threads=options.threads,
        engine_flags=tuple(engine_flags),
        kv_host_mb=options.kv_host_mb,
        kv_host_share=options.kv_host_share,
        kv_disk_mb=options.kv_disk_mb,
        kv_disk_dir=options.kv_disk_dir,
        cluster_store=_cluster_store(options.cluster_store),
        peer_host=options.peer_host,
        peer_port=peer_port,
        exit_with_parent=options.exit_with_parent,
        drain_s=options.drain_s,
        engine_up_s=options.engine_up_s,
    )


def _require_range(flag: str, found: float | None, low: float, high: float) -> None:
    if found is not None and not low <= found <= high:
        raise NodeError(
            flag, found=str(found), allowed=f"{low} … {high}", remedy=f"pass another {flag}"
        )


def _link_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """http becomes ws, and a URL without a path gets the link's."""
    links = []
    for url in urls:
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        if scheme not in ("ws", "wss") or not parts.hostname:
            raise NodeError(
                "--gateway",
                found=url,
                allowed="ws://HOST:LINK-PORT or wss://…",
                remedy="name the gateway's link port, not its API port",
            )
        path = parts.path if parts.path.strip("/") else LINK_PATH
        links.append(parts._replace(scheme=scheme, path=path).geturl())
    unique = tuple(dict.fromkeys(links))
    if len(unique) > MAX_LINKS:
        raise NodeError(
            "--gateway",
            found=f"{len(unique)} URLs",
            allowed=f"at most {MAX_LINKS}",
            remedy="start another node agent for the rest",
        )
    return unique


def _cluster_store(url: str | None) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme == "mooncake" and bool(parts.hostname and parts.port)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise NodeError(
            "--cluster-store",
            found=url,
            allowed="mooncake://HOST:PORT of a Mooncake master",
            remedy="start mooncake_master and name its RPC port",
        )
    return url


def _join_token(token: str | None, file: Path | None) -> str:
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise NodeError(
                "--join-token-file",
                found=str(error),
                allowed="a readable file that holds the token",
                remedy="copy home/join.token from the gateway's machine",
            ) from error
    token = (token or "").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise NodeError(
            "--join-token",
            found="no printable token",
            allowed="the token of the gateways that the node joins",
            remedy="pass --join-token-file FILE",
        )
    return token


def _node_id(node_id: str | None) -> str | None:
    if node_id is None:
        return None
    plain = node_id.replace("-", "").replace("_", "").replace(".", "")
    if not plain.isalnum() or not node_id.isascii() or len(node_id) > 64 or node_id[0] == ".":
        raise NodeError(
            "--node-id",
            found=repr(node_id),
            allowed="1 to 64 letters, digits, '-', '_' or '.'",
            remedy="choose a plain name such as n1",
        )
    return node_id
