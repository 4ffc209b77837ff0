"""The gateway of the API's tests, and its operator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.api.conftest import KEY, RunningGateway
from tests.gateway.api.conftest import gateway as gateway
from tests.gateway.api.conftest import shared_gateway as shared_gateway
from tests.gateway.api.conftest import start as start


@pytest.fixture
def admin(gateway: RunningGateway) -> Iterator[httpx.Client]:
    """Speaks to the admin listener with the operator's token."""
    with httpx.Client(
        base_url=gateway.addresses.admin_url,
        headers={"authorization": f"Bearer {gateway.services.home.admin_token}"},
        timeout=20,
        trust_env=False,
    ) as client:
        yield client


@pytest.fixture
def chat(gateway: RunningGateway) -> Callable[..., str]:
    """chat(script, **headers): one turn; its request id, once its row is settled."""

    def turn(script: dict[str, Any], *, key: str = KEY, **headers: str) -> str:
        body = {"model": "tiny", "messages": [{"role": "user", "content": json.dumps(script)}]}
        with gateway.client(key=key) as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = client.post("/v1/chat/completions", json=body, headers=named)
        gateway.wait_idle()
        return str(answer.headers["x-request-id"])

    return turn
