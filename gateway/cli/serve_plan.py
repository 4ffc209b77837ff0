"""What `kagari serve` will start, as values: a gateway, its nodes, their ports."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from gateway.cli.problem import Problem
from policies.contract.wire import Compute, Role
from policies.cores import Cores, cpu_limit, threads_each
from policies.pairing import SplitMode

DEFAULT_PORT = 8000
DEFAULT_MODEL = "smollm2-135m"
# Engine flags that may be given for each role, and what an engine does without them.
BY_ROLE = {"--compute": "exact", "--dtype": "auto", "--kv-dtype": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The flags of `serve`; None and empty mean that the default of the child holds."""

    home: Path
    models: tuple[str, ...] = ()
    num_nodes: int | None = None  # None: one, unless there are prefill and decode nodes
    num_prefill: int | None = None
    num_decode: int | None = None
    split: str | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # of any of the three, 0 means a free one
    link_port: int = 0
    admin_port: int = 0
    config: Path | None = None
    key_file: Path
    join_token_file: Path
    threads: int | None = None
    script: Path | None = None
    # Flags and values in turn, handed to every node agent; those in BY_ROLE may differ by role.
    engine_flags: tuple[str, ...] = ()
    upstreams: tuple[str, ...] = ()  # URLs of foreign servers
    upstream_flags: tuple[str, ...] = ()  # what is said of them, handed to the gateway

    @property
    def has_nodes(self) -> bool:
        """Upstreams alone need none; whoever names a model or a count wants them too."""
        counts = (self.num_nodes, self.num_prefill, self.num_decode)
        is_counted = any(count is not None for count in counts)
        return not self.upstreams or bool(self.models) or self.script is not None or is_counted


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
    """Argument lists of all children. Raises Problem on what makes no sense."""
    roles = node_roles(options) if options.has_nodes else ()
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
    if options.split is not None:
        gateway += ["--split", options.split]
    for url in options.upstreams:
        gateway += ["--upstream", url]
    gateway += options.upstream_flags
    node = [
        *("--gateway", f"ws://{link_host(options.host)}:{link_port}"),
        *("--join-token-file", str(options.join_token_file)),
        *("--home", str(options.home)),
    ]
    for model in models:
        node += ["--model", model]
    threads = options.threads or threads_each(own_cores(), max(1, len(roles)) * len(models))
    node += ["--threads", str(threads)]
    if len(roles) > 1:  # a lone engine's own memory is quicker, and taken as it fills
        node += ["--kv-host-share", str(options.home)]
    if options.script is not None:
        node += ["--script", str(options.script)]
    flags_of = {role: ("--role", role, *engine_flags(options, role)) for role in set(roles)}
    if len({kept_pages(flags) for flags in flags_of.values()}) > 1:
        # Another node's pages are not those that a node would compute: no answer is exact.
        flags_of = {role: (*flags, "--announce", "fast") for role, flags in flags_of.items()}
    return ServePlan(
        gateway=Launch("gateway", "gateway", tuple(gateway)),
        nodes=tuple(
            Launch(f"n{index}", "node_agent", ("--node-id", f"n{index}", *node, *flags_of[role]))
            for index, role in enumerate(roles, start=1)
        ),
        num_models=len(models),
        api_url=f"http://{url_host(options.host)}:{port}",
        admin_url=f"http://127.0.0.1:{admin_port}",  # the operator's, whatever --host says
    )


def node_roles(options: ServeOptions) -> tuple[Role, ...]:
    """Of n1, n2 and so on: prefill nodes first. Raises Problem."""
    roles: list[Role]
    prefill, decode = options.num_prefill, options.num_decode
    if prefill is None and decode is None:
        count = 1 if options.num_nodes is None else options.num_nodes
        require_count("--nodes", count, "leave --nodes away for one node")
        roles = ["mixed"] * count
        return tuple(roles)
    if options.num_nodes is not None:
        raise Problem(
            "--nodes",
            found="it beside --prefill or --decode",
            allowed="mixed nodes, or prefill and decode nodes",
            remedy="leave --nodes away, or the other two",
        )
    if prefill is None or decode is None:
        raise Problem(
            "--decode" if decode is None else "--prefill",
            found="one of --prefill and --decode alone",
            allowed="both, each 1 or more",
            remedy="pass both, or --nodes for nodes that do all",
        )
    require_count("--prefill", prefill, "pass how many nodes compute prompts")
    require_count("--decode", decode, "pass how many nodes decode")
    roles = ["prefill"] * prefill
    roles += ["decode"] * decode
    return tuple(roles)


def require_count(flag: str, found: int, remedy: str) -> None:
    if found < 1:
        raise Problem(flag, found=str(found), allowed="1 or more", remedy=remedy)


def engine_flags(options: ServeOptions, role: Role) -> list[str]:
    """Those of a node of this role. Raises Problem."""
    flags: list[str] = []
    for flag, value in zip(options.engine_flags[::2], options.engine_flags[1::2], strict=True):
        value_by_role = by_role(flag, value) if flag in BY_ROLE else {role: value}
        if flag == "--compute":
            for told in value_by_role.values():
                require_compute(told)
        if role in value_by_role:
            flags += [flag, value_by_role[role]]
    return flags


def kept_pages(flags: Sequence[str]) -> tuple[str, ...]:
    """What decides on the bits of a node's pages, of its flags and their values in turn."""
    told = BY_ROLE | dict(zip(flags[::2], flags[1::2], strict=True))
    return tuple([told[flag] for flag in BY_ROLE])


def by_role(flag: str, text: str) -> dict[str, str]:
    """`bf16`, or `prefill=bf16,decode=fp8`, where a role that is not named keeps the default."""
    if "=" not in text:
        return dict.fromkeys(get_args(Role), text)
    value_by_role = dict([part.partition("=")[::2] for part in text.split(",")])
    if not (all(value_by_role.values()) and value_by_role.keys() <= set(get_args(Role))):
        raise Problem(
            flag,
            found=text,
            allowed="one value, or ROLE=VALUE of prefill, decode and mixed, with commas",
            remedy=f"pass it as {flag} prefill=VALUE,decode=VALUE",
        )
    return value_by_role


def require_split(value: str | None) -> None:
    """Raises Problem before anything starts; None leaves the gateway's default, auto."""
    if value is not None and value not in list(SplitMode):
        raise Problem(
            "--split",
            found=value,
            allowed=" or ".join(SplitMode),
            remedy="leave it away for auto: a prompt is computed elsewhere where that pays",
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
