"""What an engine is told at its start: the model, its flags, and the scheduler's limits."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from policies.contract.wire import Compute, Tier

DType = Literal["auto", "bf16", "fp32"]
KvDType = Literal["auto", "bf16", "fp32", "fp8", "int8"]
Device = Literal["auto", "cpu", "cuda"]
Announced = Literal["auto", "exact", "fast"]
Overlap = Literal["on", "off"]
TransferWay = Literal["auto", "tcp", "mooncake"]

DEFAULT_KV_DEVICE_TOKENS = 65_536
DEFAULT_STEP_TOKENS = 512
DEFAULT_MAX_RUNNING = 64
DEFAULT_MAX_WAITING = 1024
MIN_PAGE_SIZE = 16


class ConfigError(ValueError):
    """A setting that cannot work, said in four parts: field, found, allowed, remedy."""

    def __init__(self, field: str, *, found: object, allowed: str, remedy: str) -> None:
        super().__init__(f"{field}: found {found}, allowed {allowed}; {remedy}")
        self.field, self.found, self.allowed, self.remedy = field, found, allowed, remedy


class RopeScaling(Struct, frozen=True, forbid_unknown_fields=True):
    """A stretched context (YaRN): positions scaled by factor from original_context_tokens."""

    type: Literal["yarn"]
    factor: float
    original_context_tokens: int


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One servable model, as the node agent describes it to its engine (JSON on the command line).

    identity: equal identities may share pages. path: a .gguf file or a Hugging Face folder.
    context_tokens overrides what the checkpoint says.
    """

    name: str
    identity: str
    path: str
    format: Literal["gguf", "safetensors"]
    rope_scaling: RopeScaling | None = None
    context_tokens: int | None = None
    page_size: int = 64
    tokenizer_digest: str = ""
    bundle_digest: str = ""
    aliases: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        if self.context_tokens is not None and self.context_tokens < 2:
            raise ConfigError(
                "context_tokens",
                found=self.context_tokens,
                allowed="2 or more",
                remedy="leave it out to use the checkpoint's own",
            )


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The command line of `python -m engine serve`, read once."""

    spec: ModelSpec
    engine_index: int
    dtype: DType = "auto"
    kv_dtype: KvDType = "auto"
    compute: Compute = "exact"
    announce: Announced = "auto"  # of its answers and pages; auto: what compute says
    kv_device_tokens: int = DEFAULT_KV_DEVICE_TOKENS
    threads: int | None = None
    device: Device = "auto"
    step_tokens: int = DEFAULT_STEP_TOKENS
    max_running: int = DEFAULT_MAX_RUNNING
    overlap: Overlap = "off"  # plan a step while the one before it computes
    script: str | None = None
    bundle: str | None = None
    kv_host_mb: int = 0  # 0: no such tier
    kv_host_share: str | None = None  # engines of this machine that name one folder share it
    kv_disk_mb: int = 0
    kv_disk_dir: str | None = None
    cluster_store: str | None = None
    peer_host: str = "127.0.0.1"  # where other engines bring pages
    peer_port: int | None = 0  # 0: a free one; None: it takes no part in splits
    transfer: TransferWay = "auto"

    def __post_init__(self) -> None:
        check_compute(self.compute, self.announce)
        if self.kv_dtype not in get_args(KvDType):
            raise ConfigError(
                "--kv-dtype",
                found=self.kv_dtype,
                allowed=", ".join(get_args(KvDType)),
                remedy="leave it out for bf16; int8 and fp8 keep nearly twice as many tokens",
            )
        if self.kv_device_tokens < 2 * self.spec.page_size:
            raise ConfigError(
                "--kv-device-tokens",
                found=self.kv_device_tokens,
                allowed=f"{2 * self.spec.page_size} (two pages) or more",
                remedy="raise it to at least the longest prompt plus its completion",
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(
                "--threads",
                found=self.threads,
                allowed="1 or more",
                remedy="leave it out to use the cores there are",
            )
        if self.script is not None and self.bundle is None:
            raise ConfigError(
                "--bundle",
                found="nothing",
                allowed="a tokenizer bundle file beside --script",
                remedy="pass --bundle FILE",
            )
        for field, megabytes in (
            ("--kv-host-mb", self.kv_host_mb),
            ("--kv-disk-mb", self.kv_disk_mb),
        ):
            if megabytes < 0:
                raise ConfigError(
                    field,
                    found=megabytes,
                    allowed="megabytes, 0 or more",
                    remedy="leave it out, or give 0, for no such tier",
                )
        if self.kv_host_share is not None and not self.kv_host_mb:
            raise ConfigError(
                "--kv-host-share",
                found=f"{self.kv_host_share} without --kv-host-mb",
                allowed="beside --kv-host-mb",
                remedy="say how large the shared tier is, or leave --kv-host-share out",
            )
        if self.kv_disk_mb and self.kv_disk_dir is None:
            raise ConfigError(
                "--kv-disk-dir",
                found="nothing",
                allowed="a folder beside --kv-disk-mb",
                remedy="pass --kv-disk-dir DIR, or leave out --kv-disk-mb",
            )
        check_peer(self.peer_host, self.peer_port)
        check_batch(self.step_tokens, self.max_running)

    @property
    def num_pages(self) -> int:
        return self.kv_device_tokens // self.spec.page_size

    @property
    def promised(self) -> Compute:
        """What it says of its answers and its pages."""
        return self.compute if self.announce == "auto" else self.announce


class TierConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A slower tier as the scheduler sees it; its speed is assumed so until a fetch is measured."""

    name: Tier
    capacity_pages: int  # 0: a store that keeps what it will
    bytes_per_s: float = 1e9
    latency_s: float = 0.002


class ScheduleConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The scheduler's limits. context_tokens counts prompt and completion together."""

    num_pages: int
    page_size: int
    context_tokens: int
    vocab_size: int = 1 << 32  # token ids are below it
    step_tokens: int = DEFAULT_STEP_TOKENS
    max_running: int = DEFAULT_MAX_RUNNING
    max_waiting: int = DEFAULT_MAX_WAITING
    prefill_tokens_per_s: float = 2000.0  # until a rate is measured
    tiers: tuple[TierConfig, ...] = ()  # below the device, fastest first
    page_bytes: int = 0

    def __post_init__(self) -> None:
        check_batch(self.step_tokens, self.max_running)
        if self.num_pages < 1 or self.page_size < 1 or self.context_tokens < 2:
            raise ConfigError(
                "num_pages, page_size, context_tokens",
                found=(self.num_pages, self.page_size, self.context_tokens),
                allowed="at least 1, 1 and 2",
                remedy="raise --kv-device-tokens",
            )


def read_peer_port(flag: str) -> int | None:
    """The value of --peer-port. Raises ConfigError if it is none."""
    if flag == "none":
        return None
    if flag.isascii() and flag.isdecimal() and int(flag) < 1 << 16:
        return int(flag)
    raise ConfigError(
        "--peer-port",
        found=flag,
        allowed="a port, 0 for a free one, or none",
        remedy="leave it out for a free one; none: the engine takes no part in splits",
    )


def check_peer(host: str, port: int | None) -> None:
    """Raises ConfigError on an address that means every one, which no peer can connect to."""
    if port is not None and host in ("", "0.0.0.0", "::", "*"):
        raise ConfigError(
            "--peer-host",
            found=repr(host),
            allowed="the one address of this machine that other nodes reach",
            remedy="name it, or leave it out if all nodes are on this machine",
        )


def check_compute(compute: str, announce: str) -> None:
    """Raises ConfigError on what is no way to compute, and where more is announced than is kept."""
    if compute not in get_args(Compute):
        raise ConfigError(
            "--compute",
            found=compute,
            allowed=" or ".join(get_args(Compute)),
            remedy="leave it out for exact: the same tokens whatever runs beside them",
        )
    if announce not in get_args(Announced) or (compute, announce) == ("fast", "exact"):
        raise ConfigError(
            "--announce",
            found=f"{announce} beside --compute {compute}",
            allowed="auto, fast, or exact beside --compute exact",
            remedy="leave it out to announce what --compute says",
        )


def check_page_size(page_size: int) -> None:
    """Raises ConfigError unless page_size is a power of two of at least MIN_PAGE_SIZE."""
    if page_size < MIN_PAGE_SIZE or page_size & (page_size - 1):
        raise ConfigError(
            "page_size",
            found=page_size,
            allowed=f"a power of two, {MIN_PAGE_SIZE} or more",
            remedy="use 64",
        )


def check_batch(step_tokens: int, max_running: int) -> None:
    """Every running sequence must find a token's room in a step, or decoding would starve it."""
    if not 1 <= max_running <= step_tokens:
        raise ConfigError(
            "--max-running",
            found=max_running,
            allowed=f"1 to --step-tokens ({step_tokens})",
            remedy="lower --max-running or raise --step-tokens",
        )
