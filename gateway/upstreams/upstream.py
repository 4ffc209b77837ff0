"""One upstream, as an operator names it: its servers, its models by our names, its text."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from gateway.text.model import TextModel
from gateway.upstreams.server import Server
from gateway.upstreams.settings import UpstreamConfig
from policies.contract.page_keys import seed
from policies.residency import event_keys

MAX_SALTS = 4096


class Salts(Protocol):
    def salt(self, tenant: str) -> bytes: ...


class Upstream:
    """servers are either one that does all, or prefill and decode servers."""

    def __init__(self, config: UpstreamConfig, servers: tuple[Server, ...], home: Salts) -> None:
        self.config = config
        self.name = config.label
        self.servers = servers
        self.text: TextModel | None = None
        self._home = home
        self._salt_by_name: OrderedDict[str, bytes] = OrderedDict()  # as cache_salt was sent

    @property
    def is_split(self) -> bool:
        return self.config.url is None

    @property
    def is_salted(self) -> bool:
        """A tenant's pages there are for that tenant alone."""
        return self.config.dialect == "vllm" and self.config.cache_salt

    @property
    def mixed(self) -> list[Server]:
        """Servers that can serve a request whole."""
        alone = self.config.dialect == "vllm" and self.config.local_prefill
        return [
            one for one in self.servers if one.role == "mixed" or (one.role == "decode" and alone)
        ]

    def of_role(self, role: str) -> list[Server]:
        return [server for server in self.servers if server.role == role]

    def is_up(self) -> bool:
        """Some way through it is."""
        up = {server.role for server in self.servers if server.probes.is_up}
        return {"prefill", "decode"} <= up or any(one.probes.is_up for one in self.mixed)

    def names(self) -> dict[str, str]:
        """Our name → its own, of what its servers list now."""
        listed: dict[str, str] = {}
        for server in self.servers:
            if server.probes.is_up:
                listed |= {name: name for name in server.listed}
        if not self.config.models:
            return listed
        return {
            ours: theirs
            for ours, theirs in self.config.models.items()
            if theirs in listed or not listed
        }

    def context_tokens(self, own_name: str) -> int | None:
        """The window: as configured, as its servers tell, as the tokenizer's folder does."""
        told = [
            window
            for server in self.servers
            if (one := server.listed.get(own_name)) and (window := one.context_tokens)
        ]
        by_text = None if self.text is None else self.text.context_tokens
        return self.config.context_tokens or min(told, default=by_text)

    # --- pages ------------------------------------------------------------------------------------

    def salt(self, tenant: str) -> bytes:
        """Where tenants share pages there, what they share is one."""
        return self._home.salt(tenant if self.is_salted else "")

    def cache_salt(self, tenant: str) -> str:
        """What the server is told to keep a tenant's pages apart by; nobody can guess it."""
        salt = self.salt(tenant)
        name = sha256(b"cache_salt" + salt).hexdigest()[:32]
        self._salt_by_name[name] = salt
        self._salt_by_name.move_to_end(name)
        if len(self._salt_by_name) > MAX_SALTS:
            self._salt_by_name.popitem(last=False)
        return name

    def salt_named(self, cache_salt: str | None) -> bytes | None:
        """The salt behind a cache_salt that a server tells of; None if it is none of ours."""
        if cache_salt is None:
            return None if self.is_salted else self.salt("")
        return self._salt_by_name.get(cache_salt)

    def root(self, model: str, salt: bytes) -> bytes:
        """Of a chain of page keys."""
        assert self.text is not None, "without text nobody knows pages"
        return seed(
            identity=model,
            tokenizer_digest=self.text.tokenizer_digest,
            page_size=self.text.page_size,
            salt=salt,
        )

    def event_keys(self, model: str, tenant: str, ids: array[int]) -> list[bytes]:
        """Of a prompt's full pages, deepest first; none without a text."""
        if self.text is None:
            return []
        return event_keys(self.text.page_keys(self.root(model, self.salt(tenant)), ids))


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """A model that upstreams serve now; own_names in the order of upstreams."""

    name: str
    upstreams: tuple[Upstream, ...]
    own_names: tuple[str, ...]
    alias_of: str | None = None

    @property
    def canonical(self) -> str:
        return self.alias_of or self.name

    @property
    def text(self) -> TextModel | None:
        """Of the first that has one."""
        return next((one.text for one in self.upstreams if one.text is not None), None)

    @property
    def context_tokens(self) -> int | None:
        windows = [
            window
            for upstream, own_name in zip(self.upstreams, self.own_names, strict=True)
            if (window := upstream.context_tokens(own_name)) is not None
        ]
        return min(windows, default=None)

    def own_name(self, upstream: Upstream) -> str:
        return self.own_names[self.upstreams.index(upstream)]
