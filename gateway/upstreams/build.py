"""From the operator's tables to upstreams that can be asked; imported only where there are any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from gateway.config import ConfigError, read_secret
from gateway.upstreams.kv_listener import listening
from gateway.upstreams.registry import Upstreams
from gateway.upstreams.server import Server
from gateway.upstreams.settings import UpstreamConfig, base_url
from gateway.upstreams.text_folder import TextFolderError, load_text
from gateway.upstreams.transport import Connections
from gateway.upstreams.upstream import Salts, Upstream
from policies.contract.wire import Role
from policies.routing import RoutingParameters


@asynccontextmanager
async def running_upstreams(
    configs: tuple[UpstreamConfig, ...], home: Salts, parameters: RoutingParameters
) -> AsyncIterator[Upstreams]:
    """Probed and listened to while the block runs. Raises ConfigError."""
    built = [
        await _build(f"upstreams.{number}", config, home) for number, config in enumerate(configs)
    ]
    upstreams = Upstreams(built, parameters)
    listeners = [
        listening(upstream, server, address, replay)
        for upstream in built
        for server, address, replay in _listened(upstream)
    ]
    async with upstreams.running(listeners):
        yield upstreams


async def _build(field: str, config: UpstreamConfig, home: Salts) -> Upstream:
    if config.kv_events and find_spec("zmq") is None:
        raise ConfigError(
            f"{field}.kv_events",
            "no pyzmq here",
            "pyzmq, which reads them",
            "pip install 'kagari[upstreams]', or leave them out.",
        )
    api_key = None if config.api_key_file is None else read_secret(config.api_key_file)
    servers = tuple(
        Server(
            name,
            role,
            base,
            config,
            Connections(base, api_key=api_key, connect_s=config.connect_s),
        )
        for name, role, base in _servers(config)
    )
    upstream = Upstream(config, servers, home)
    if config.tokenizer is not None:
        try:
            upstream.text = await asyncio.to_thread(
                load_text,
                config.tokenizer,
                page_size=config.page_size,
                context_tokens=config.context_tokens,
            )
        except TextFolderError as error:
            raise ConfigError(
                f"{field}.tokenizer",
                f"{config.tokenizer}, {error}",
                "a folder with tokenizer.json and config.json",
                "Copy them from the model's source.",
            ) from error
    return upstream


def _servers(config: UpstreamConfig) -> Iterator[tuple[str, Role, str]]:
    """(name, role, base URL); one that is alone has the upstream's own name."""
    if config.url is not None:
        yield config.label, "mixed", base_url(config.url)
    for number, url in enumerate(config.prefill, start=1):
        yield f"{config.label}/p{number}", "prefill", base_url(url)
    for number, url in enumerate(config.decode, start=1):
        yield f"{config.label}/d{number}", "decode", base_url(url)


def _listened(upstream: Upstream) -> Iterator[tuple[Server, str, str | None]]:
    """The servers whose page events are listened to, where, and where lost ones are had again."""
    config = upstream.config
    prefilling = [server for server in upstream.servers if server.role != "decode"]
    replays = config.kv_replay or (None,) * len(config.kv_events)
    yield from zip(prefilling, config.kv_events, replays, strict=bool(config.kv_events))
