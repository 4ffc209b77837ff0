"""What an operator says of an upstream: one table of `[[upstreams]]`, or the flag `--upstream`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

Dialect = Literal["openai", "vllm", "sglang"]


class UpstreamConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One server at `url`, or the prefill and decode servers of one cluster.

    models: our name → its own; empty: every model it lists, by its own name. aliases: further
    name → our name. tokenizer: a folder with tokenizer.json, so that prompts are counted and their
    pages known here. kv_events, kv_replay: vLLM's ZMQ addresses, one a server that prefills.
    """

    url: str | None = None
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    dialect: Dialect = "openai"
    name: str | None = None  # None: host and port of the first address
    models: dict[str, str] = {}
    aliases: dict[str, str] = {}
    api_key_file: str | None = None
    tokenizer: str | None = None
    page_size: int = 64
    context_tokens: int | None = None  # None: as it tells, else as the tokenizer's folder does
    tools: bool = True
    logprobs: bool = True
    choices: bool = True  # n above 1
    stream_usage: bool = True  # False: it refuses stream_options
    cache_salt: bool = True  # vLLM: a tenant's pages serve that tenant alone
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()
    bootstrap_port: int = 8998  # SGLang, of the prefill servers
    local_prefill: bool = True  # vLLM: without a prefill server the decode server does both
    max_in_flight: int = 256  # on each server
    prefill_tokens_per_s: float = 0.0  # 0: not known
    connect_s: float = 5.0
    first_byte_s: float = 300.0
    idle_s: float = 120.0
    probe_s: float = 5.0
    answer_bytes: int = 64 << 20  # of an answer that is not streamed

    @property
    def prefilling(self) -> tuple[str, ...]:
        return self.prefill if self.url is None else (self.url,)

    @property
    def label(self) -> str:
        return self.name or urlsplit(self.prefilling[0]).netloc


class SettingProblem(NamedTuple):
    """Which setting, what was found, what is allowed, the remedy."""

    field: str
    found: str
    allowed: str
    remedy: str


def find_problem(upstreams: Iterable[UpstreamConfig]) -> SettingProblem | None:
    """The first thing that cannot be; field is a name below `upstreams`, such as `0.url`."""
    labels: set[str] = set()
    for number, upstream in enumerate(upstreams):
        problem = _problem_of(upstream)
        if problem is None and upstream.label in labels:
            problem = SettingProblem(
                "name", upstream.label, "a name of its own", "Give each a name."
            )
        if problem is not None:
            return problem._replace(field=f"{number}.{problem.field}")
        labels.add(upstream.label)
    return None


def _problem_of(upstream: UpstreamConfig) -> SettingProblem | None:
    is_pair = bool(upstream.prefill or upstream.decode)
    if is_pair == (upstream.url is not None) or bool(upstream.prefill) != bool(upstream.decode):
        found = "both or half of them" if is_pair else "neither"
        allowed = "url, or prefill and decode"
        return SettingProblem("url", found, allowed, "Name one server, or both roles' servers.")
    if is_pair and upstream.dialect == "openai":
        allowed = '"vllm" or "sglang" with prefill and decode'
        return SettingProblem("dialect", '"openai"', allowed, "Say which protocol they speak.")
    for url in (*upstream.prefilling, *upstream.decode):
        wrong = _wrong_url(url)
        if wrong is not None:
            allowed = "http://HOST:PORT or https://HOST, perhaps with a path"
            remedy = "A key belongs into a file that api_key_file names."
            return SettingProblem("url", wrong, allowed, remedy)
    for field in ("kv_events", "kv_replay"):
        addresses: tuple[str, ...] = getattr(upstream, field)
        if addresses and (upstream.dialect != "vllm" or upstream.tokenizer is None):
            allowed = 'dialect "vllm" and a tokenizer'
            return SettingProblem(field, "addresses", allowed, "Events name pages by tokens.")
        if addresses and len(addresses) != len(upstream.prefilling):
            allowed = f"{len(upstream.prefilling)}, one a server that prefills"
            return SettingProblem(field, str(len(addresses)), allowed, "Give each its own.")
    if upstream.kv_replay and not upstream.kv_events:
        return SettingProblem("kv_replay", "no kv_events", "kv_events too", "Name both.")
    for field in (
        "max_in_flight",
        "connect_s",
        "first_byte_s",
        "idle_s",
        "probe_s",
        "answer_bytes",
    ):
        value = getattr(upstream, field)
        if not value > 0:
            return SettingProblem(field, str(value), "a number above 0", "Raise it.")
    size = upstream.page_size
    if size < 16 or size & (size - 1):
        return SettingProblem("page_size", str(size), "a power of two from 16", "64 is usual.")
    for alias, model in upstream.aliases.items():
        if upstream.models and model not in upstream.models:
            known = " or ".join(upstream.models)
            return SettingProblem(f"aliases.{alias}", model, known, "Name one of models.")
    return None


def _wrong_url(url: str) -> str | None:
    """What is wrong with it, without what may be a secret in it."""
    try:
        parts: SplitResult = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "no URL"
    if parts.scheme not in ("http", "https") or not has_host:
        return "no http URL"
    if parts.username is not None or parts.password is not None:
        return "a URL with a user or a password in it"
    if parts.query or parts.fragment:
        return "a URL with a query or a fragment"
    return None


def base_url(url: str) -> str:
    """Without the `/v1` that clients' settings end in, so that both spellings are the same."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
