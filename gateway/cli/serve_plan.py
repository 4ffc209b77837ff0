"""What `kagari serve` will start, as values: a gateway, its nodes, their ports."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from gateway.cli.problem import Problem
from policies.contract.wire import Compute
from policies.cores import Cores, cpu_limit, threads_each

DEFAULT_PORT = 8000
DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The flags of `serve`; None and empty mean that the default of the child holds."""

    home: Path
    models: tuple[str, ...] = ()
    num_nodes: int = 1
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # of any of the three, 0 means a free one
    link_port: int = 0
    admin_port: int = 0
    config: Path | None = None
    key_file: Path
    join_token_file: Path
    threads: int | None = None
    script: Path | None = None
    engine_flags: tuple[str, ...] = ()  # handed to every node agent as they are
    upstreams: tuple[str, ...] = ()  # URLs of foreign servers
    upstream_flags: tuple[str, ...] = ()  # what is said of them, handed to the gateway

    @property
    def has_nodes(self) -> bool:
        """Upstreams alone need none; whoever names a model or a count wants them too."""
        return not self.upstreams or bool(self.models) or self.script is not None


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start: its name in logs and on screen, the module and its arguments."""

    name: str
    module: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServePlan:
    gateway: Launch
    nodes: tuple[Launch, ...]
    num_models: int  # of each node
    api_url: str
    admin_url: str


def plan_serve(options: ServeOptions, *, port: int, link_port: int, admin_port: int) -> ServePlan:
    """Argument lists of all children. Raises Problem on a count that makes no sense."""
    if options.has_nodes and options.num_nodes < 1:
        raise Problem(
            "--nodes",
            found=str(options.num_nodes),
            allowed="1 or more",
            remedy="leave --nodes away for one node",
        )
    models = options.models or (DEFAULT_MODEL,)
    gateway = [
        *("--host", options.host),
        *("--port", str(port)),
        *("--link-port", str(link_port)),
        *("--admin-port", str(admin_port)),
        *("--home", str(options.home)),
        *("--api-key-file", str(options.key_file)),
        *("--join-token-file", str(options.join_token_file)),
    ]
    for model in options.models:
        gateway += ["--model", model]
    if options.config is not None:
        gateway += ["--config", str(options.config)]
    for url in options.upstreams:
        gateway += ["--upstream", url]
    gateway += options.upstream_flags
    node = [
        *("--gateway", f"ws://{link_host(options.host)}:{link_port}"),
        *("--join-token-file", str(options.join_token_file)),
        *("--home", str(options.home)),
        *("--role", "mixed"),
    ]
    for model in models:
        node += ["--model", model]
    threads = options.threads or threads_each(own_cores(), options.num_nodes * len(models))
    node += ["--threads", str(threads)]
    if options.num_nodes > 1:  # a lone engine's own memory is quicker, and taken as it fills
        node += ["--kv-host-share", str(options.home)]
    if options.script is not None:
        node += ["--script", str(options.script)]
    node += options.engine_flags
    return ServePlan(
        gateway=Launch("gateway", "gateway", tuple(gateway)),
        nodes=tuple(
            Launch(f"n{index}", "node_agent", ("--node-id", f"n{index}", *node))
            for index in range(1, options.num_nodes + 1 if options.has_nodes else 1)
        ),
        num_models=len(models),
        api_url=f"http://{url_host(options.host)}:{port}",
        admin_url=f"http://127.0.0.1:{admin_port}",  # the operator's, whatever --host says
    )


def own_cores() -> Cores:
    """By this process's affinity mask and its cgroups' quotas, which its children inherit."""

    def read(path: str) -> str | None:
        try:
            return Path(path).read_text()
        except OSError:
            return None

    return Cores(len(os.sched_getaffinity(0)), cpu_limit(read))


def require_compute(value: str | None) -> None:
    """Raises Problem before anything starts; None leaves the engine's default, exact."""
    if value is not None and value not in get_args(Compute):
        raise Problem(
            "--compute",
            found=value,
            allowed=" or ".join(get_args(Compute)),
            remedy="leave it away for exact: the same tokens whatever runs beside them",
        )


def link_host(host: str) -> str:
    """Where our own nodes dial: a wildcard address is not one to connect to."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, url_host(host))


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def require_free_port(host: str, port: int, flag: str) -> None:
    """Raises Problem when another process listens there, before anything is started."""
    try:
        listener(host, port).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise Problem(
            flag,
            found=f"{host}:{port}, {'in use by another process' if taken else error.strerror}",
            allowed="an address of this machine and a port that nobody listens on",
            remedy=f"pass another {flag}, or stop what listens: ss -ltnp 'sport = :{port}'",
        ) from error


def free_ports(host: str, count: int) -> list[int]:
    """Held all at once while they are drawn, so that no two are the same."""
    sockets = [listener(host, 0) for _ in range(count)]
    ports: list[int] = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1)
    except OSError:
        sock.close()
        raise
    return sock
