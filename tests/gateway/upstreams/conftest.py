"""Gateways before scripted foreign servers, on real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.upstreams.settings import UpstreamConfig
from tests.gateway.api.conftest import QUICK, RunningGateway, start_gateway


@pytest.fixture
def relayed(tmp_path: Path) -> Callable[..., Any]:
    """relayed(url or settings, …): a gateway without nodes before those upstreams, once as many of
    them serve as it says (all, if nothing); at its end everything must have been given back and
    every row settled."""

    @contextmanager
    def start(
        *upstreams: Any, serving: int | None = None, **sections: Any
    ) -> Iterator[RunningGateway]:
        configs = tuple(
            UpstreamConfig(**({"probe_s": 0.1} | ({"url": one} if isinstance(one, str) else one)))
            for one in upstreams
        )
        config = msgspec.structs.replace(QUICK, upstreams=configs, **sections)
        with start_gateway(tmp_path / "home", config, nodes=0) as gateway:
            needed = len(upstreams) if serving is None else serving
            until(lambda: len(gateway.call(lambda: _serving(gateway))) >= needed)
            yield gateway
            gateway.wait_settled()

    return start


def until(is_so: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _serving(gateway: RunningGateway) -> set[str]:
    """What requests see: of a server that is up its models may not be listed yet."""
    models = gateway.services.upstreams.models()
    return {upstream.name for model in models for upstream in model.upstreams}
