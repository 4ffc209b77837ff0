"""One typed TOML for the gateway: read once, frozen, and every value knows where it came from.

A value comes, in rising order, from the default, the file, the environment
(`KAGARI_SECTION__KEY`) and the command line. Unknown names stop the start with the nearest name
that exists. Secrets are given as `…_file`, so that neither the file nor `config show` holds them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gateway.errors import near
from gateway.upstreams.settings import UpstreamConfig, find_problem
from policies.admission import AdmissionLimits
from policies.contract.wire import MAX_LANES
from policies.pairing import SplitMode
from policies.routing import RoutingPolicy

ENV_PREFIX = "KAGARI_"


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Listeners. A port of 0 takes a free one, which the ready line prints."""

    host: str = "127.0.0.1"
    port: int = 8000
    link_host: str | None = None  # None: the same as host
    link_port: int = 8001
    admin_host: str = "127.0.0.1"
    admin_port: int = 8002
    backlog: int = 1024
    keep_alive_s: float = 75.0  # harnesses pause longer than a server's usual 5 s between turns
    keep_alive_max_requests: int = 1_000_000
    max_streams_per_connection: int = 100  # HTTP/2
    send_buffer_bytes: int = 256 << 10  # what the kernel keeps for a slow reader
    drain_s: float = 20.0


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What one request may be. The body's deadline is grace + bytes so far ÷ least rate."""

    body_bytes: int = 20 << 20
    body_bytes_in_flight: int = 512 << 20  # over all requests that are being read
    body_grace_s: float = 10.0
    body_min_bytes_per_s: int = 64 << 10
    header_bytes: int = 32 << 10
    stop_strings: int = 16
    stop_chars: int = 256
    choices: int = 16  # n of a request, and how many of its choices run at a time
    prompts: int = 256  # of one request to /v1/completions
    max_completion_tokens: int | None = None  # on top of the model's own room
    request_deadline_s: float = 600.0
    retention_s: float = 86_400.0  # of a hint; one that asks for more is clipped
    ttft_deadline_ms: int | None = None  # of keys that have none of their own


class StreamConfig(Struct, frozen=True, forbid_unknown_fields=True):
    first_heartbeat_s: float = 0.8  # headers are held back no longer than this
    heartbeat_s: float = 5.0
    send_stall_s: float = 30.0  # a reader that takes nothing for so long is treated as gone


class IdempotencyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of answers to requests with an Idempotency-Key."""

    leave_grace_s: float = 10.0  # a run whose clients all left may be asked for again so long
    answer_bytes: int = 1 << 20  # a larger answer is not kept
    stored_bytes: int = 64 << 20  # all answers together, running ones included
    lifetime_s: float = 86_400.0


class KeysConfig(Struct, frozen=True, forbid_unknown_fields=True):
    api_key_file: str | None = None  # one literal key of tenant "default"
    join_token_file: str | None = None  # None: join.token in home


class RoutingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    policy: RoutingPolicy = RoutingPolicy.COST
    parameters_file: str | None = None  # None: the file that ships with the gateway
    max_in_flight_per_node: int = 256  # queued ones too
    queue_requests_per_engine: int = 256
    queue_tokens_per_engine: int = 2_000_000
    split: SplitMode = SplitMode.AUTO
    pairing_file: str | None = None  # None: the file that ships with the gateway
    roles: Literal["fixed", "auto"] = "fixed"  # auto: nodes change theirs with the load


class RegionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "local"
    gateway_id: str | None = None  # None: made once and kept in home


class ModelsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    default: tuple[str, ...] = ()  # these lead GET /v1/models, in this order
    prices_file: str | None = None  # None: the table that ships with the gateway


class PrefixesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    max_pages_per_tenant: int = 256  # pinned on each engine; the default pool has 1,024


class TieringConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """By tenant: the share, 0 to 1, of each tier's pages that is its own under pressure."""

    quotas: dict[str, float] = {}


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    requests: bool = True  # one JSON line a request on standard error


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    home: str = "~/.local/share/kagari"
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    admission: AdmissionLimits = AdmissionLimits()
    stream: StreamConfig = StreamConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    keys: KeysConfig = KeysConfig()
    region: RegionConfig = RegionConfig()
    routing: RoutingConfig = RoutingConfig()
    models: ModelsConfig = ModelsConfig()
    prefixes: PrefixesConfig = PrefixesConfig()
    tiering: TieringConfig = TieringConfig()
    log: LogConfig = LogConfig()
    upstreams: tuple[UpstreamConfig, ...] = ()


SECTIONS: dict[str, type[Struct]] = {
    "server": ServerConfig,
    "limits": LimitsConfig,
    "admission": AdmissionLimits,
    "stream": StreamConfig,
    "idempotency": IdempotencyConfig,
    "keys": KeysConfig,
    "region": RegionConfig,
    "routing": RoutingConfig,
    "models": ModelsConfig,
    "prefixes": PrefixesConfig,
    "tiering": TieringConfig,
    "log": LogConfig,
}


class ConfigError(Exception):
    """A setting that cannot be used: its name, what was found, what is allowed, the remedy."""

    def __init__(self, name: str, found: str, allowed: str, remedy: str) -> None:
        self.name, self.found, self.allowed, self.remedy = name, found, allowed, remedy
        super().__init__(f"{name}: found {found}; allowed is {allowed}. {remedy}")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and the origin of each of its values, by dotted name."""

    config: GatewayConfig
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, object, str]]:
        """(dotted name, value, origin) of every setting, in the order of the types."""
        rows: list[tuple[str, object, str]] = []
        for name in GatewayConfig.__struct_fields__:
            value = getattr(self.config, name)
            if name in SECTIONS:
                rows += [
                    (f"{name}.{key}", getattr(value, key), self.origins[f"{name}.{key}"])
                    for key in value.__struct_fields__
                ]
            else:
                rows.append((name, value, self.origins[name]))
        return rows


def load(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Merge all sources and check them; raises ConfigError, which names the setting.

    flags: dotted name → value; None means the flag was not given.
    """
    values: dict[str, Any] = {}
    origins = {name: "default" for name in setting_names()}
    if path is not None:
        for name, value in _from_file(path).items():
            values[name] = value
            origins[name] = f"file {path}"
    for name, value, variable in _from_environment(
        os.environ if environment is None else environment
    ):
        values[name] = value
        origins[name] = f"environment {variable}"
    for name, value in (flags or {}).items():
        if value is not None:
            _known(name)
            values[name] = value
            origins[name] = "command line"
    config = _typed(values, origins)
    _check(config)
    return Loaded(config=config, origins=origins)


def setting_names() -> list[str]:
    names: list[str] = []
    for field in GatewayConfig.__struct_fields__:
        section = SECTIONS.get(field)
        names += (
            [field] if section is None else [f"{field}.{key}" for key in section.__struct_fields__]
        )
    return names


def read_secret(path: str) -> str:
    """The one line of a secret file; raises ConfigError when it cannot be read or is empty."""
    try:
        text = Path(path).expanduser().read_text().strip()
    except OSError as error:
        reason = error.strerror or "an unreadable file"
        raise ConfigError(path, reason, "a readable file", "Check path and mode.") from error
    if not text:
        raise ConfigError(path, "an empty file", "one line", "Write the secret into it.")
    return text


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        reason = error.strerror or "an unreadable file"
        raise ConfigError(str(path), reason, "a TOML file", "Check the path.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), str(error), "TOML", "Mend that line.") from error
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and name in SECTIONS:
            for key, inner in value.items():
                values[_known(f"{name}.{key}")] = inner
        else:
            values[_known(name)] = value
    return values


def _from_environment(environment: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = []
    for variable, text in sorted(environment.items()):
        if variable == "KAGARI_HOME":
            found.append(("home", text, variable))
            continue
        if not variable.startswith(ENV_PREFIX) or "__" not in variable:
            continue
        name = variable[len(ENV_PREFIX) :].lower().replace("__", ".", 1)
        found.append((_known(name, shown=variable), text, variable))
    return found


def _known(name: str, *, shown: str | None = None) -> str:
    names = setting_names()
    if name in names:
        return name
    nearest = near(name, [*names, *SECTIONS])
    remedy = f"Did you mean {nearest[0]}?" if nearest else "Remove it."
    raise ConfigError(shown or name, "an unknown setting", "one of the documented settings", remedy)


def _typed(values: Mapping[str, Any], origins: Mapping[str, str]) -> GatewayConfig:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    # One value at a time, so that an error can name the setting and where it was set; text from
    # the environment may stand for a number, text from a file may not.
    for section, settings in [("", tree), *((s, tree[s]) for s in SECTIONS if s in tree)]:
        kind = SECTIONS[section] if section else GatewayConfig
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        for key, value in settings.items():
            if not section and key in SECTIONS:
                continue
            name = f"{section}.{key}" if section else key
            strict = not origins[name].startswith("environment")
            try:
                settings[key] = msgspec.convert(value, types[key], strict=strict)
            except msgspec.ValidationError as error:
                shown = "a table" if name == "upstreams" else repr(value)  # it may hold a secret
                raise ConfigError(
                    name, shown, str(error), f"Set by {origins[name]}; mend it there."
                ) from error
    return msgspec.convert(tree, GatewayConfig)


def _check(config: GatewayConfig) -> None:
    server = config.server
    for key in ("port", "link_port", "admin_port"):
        port = getattr(server, key)
        if not 0 <= port <= 65535:
            raise ConfigError(f"server.{key}", str(port), "0 to 65535", "Choose another port.")
    fixed = [p for p in (server.port, server.link_port, server.admin_port) if p]
    if len(fixed) != len(set(fixed)):
        raise ConfigError("server.port", "one port twice", "three ports", "Give each its own.")
    positive = {
        "server.backlog": server.backlog,
        "server.keep_alive_s": server.keep_alive_s,
        "server.max_streams_per_connection": server.max_streams_per_connection,
        "limits.body_bytes": config.limits.body_bytes,
        "limits.body_grace_s": config.limits.body_grace_s,
        "limits.body_min_bytes_per_s": config.limits.body_min_bytes_per_s,
        "limits.header_bytes": config.limits.header_bytes,
        "limits.choices": config.limits.choices,
        "limits.prompts": config.limits.prompts,
        "limits.request_deadline_s": config.limits.request_deadline_s,
        "routing.queue_requests_per_engine": config.routing.queue_requests_per_engine,
        "routing.queue_tokens_per_engine": config.routing.queue_tokens_per_engine,
        "admission.concurrent_requests": config.admission.concurrent_requests,
        "admission.concurrent_requests_per_key": config.admission.concurrent_requests_per_key,
        "stream.first_heartbeat_s": config.stream.first_heartbeat_s,
        "stream.heartbeat_s": config.stream.heartbeat_s,
        "stream.send_stall_s": config.stream.send_stall_s,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(name, str(value), "a number above 0", "Raise it.")
    ttft_deadline_ms = config.limits.ttft_deadline_ms
    if ttft_deadline_ms is not None and not ttft_deadline_ms > 0:
        raise ConfigError(
            "limits.ttft_deadline_ms",
            str(ttft_deadline_ms),
            "a number above 0",
            "Raise it, or leave it out: then nothing is refused for it.",
        )
    if not config.limits.retention_s >= 0:
        raise ConfigError(
            "limits.retention_s", str(config.limits.retention_s), "0 or more", "0 obeys no hint."
        )
    if not config.prefixes.max_pages_per_tenant >= 0:
        raise ConfigError(
            "prefixes.max_pages_per_tenant",
            str(config.prefixes.max_pages_per_tenant),
            "0 or more",
            "0 refuses every prefix.",
        )
    shares = config.tiering.quotas
    if not (all(share >= 0 for share in shares.values()) and sum(shares.values()) <= 1):
        raise ConfigError(
            "tiering.quotas",
            ", ".join(f"{tenant} = {share}" for tenant, share in shares.items()),
            "shares of 0 or more, and 1 at most together",
            "Lower them: what is left is for tenants without a quota.",
        )
    for key in IdempotencyConfig.__struct_fields__:
        value = getattr(config.idempotency, key)
        if not value >= 0:
            raise ConfigError(f"idempotency.{key}", str(value), "0 or more", "Raise it.")
    problem = find_problem(config.upstreams)
    if problem is not None:
        raise ConfigError(f"upstreams.{problem.field}", *problem[1:])
    if config.limits.choices > MAX_LANES:
        raise ConfigError(
            "limits.choices", str(config.limits.choices), f"1 to {MAX_LANES}", "Lower it."
        )
    if config.limits.body_bytes_in_flight < config.limits.body_bytes:
        raise ConfigError(
            "limits.body_bytes_in_flight",
            str(config.limits.body_bytes_in_flight),
            f"at least limits.body_bytes ({config.limits.body_bytes})",
            "Raise it, or lower limits.body_bytes.",
        )
