"""What a split tells of itself: headers, row, log line and metrics, however it went."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from gateway.config import RoutingConfig
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.requests import requests
from policies.pairing import SplitMode
from tests.gateway.api.conftest import QUICK, RunningGateway

ALWAYS = msgspec.structs.replace(QUICK, routing=RoutingConfig(split=SplitMode.ALWAYS))
PAD = "z" * 99


@pytest.fixture(scope="module")
def shared(start_once: Callable[..., Any], tmp_path_factory: Any) -> Iterator[RunningGateway]:
    home = tmp_path_factory.mktemp("home")
    with start_once(home, ALWAYS, roles=("prefill", "decode")) as gateway:
        yield gateway


@pytest.fixture
def pair(shared: RunningGateway) -> Iterator[RunningGateway]:
    for node in shared.nodes.values():
        node.served.clear()
        node.resident.clear()
    shared.services.fleet.pairs._faults.worked("n1", "n2")  # else the pair is let alone for 5 s
    yield shared
    shared.wait_settled()


def chat(pair: RunningGateway, script: dict[str, Any], **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": json.dumps(script)}]}
    with pair.client() as client:
        return client.post("/v1/chat/completions", json={**body, **fields})


def row_of(pair: RunningGateway, answer: Any) -> dict[str, Any]:
    """As `kagari usage --requests --json` tells it."""
    pair.wait_idle()
    ledger = pair.services.home.folder / LEDGER_NAME
    request_id = answer.headers["x-request-id"]
    row = next(line for line in requests(ledger) if line.request_id == request_id)
    told: dict[str, Any] = msgspec.to_builtins(row)
    return told


@pytest.mark.parametrize("stream", [False, True])
def test_a_split_names_both_nodes_and_bills_prefills_hit(
    pair: RunningGateway, stream: bool
) -> None:
    script = {"say": "hello there", "pad": PAD}
    first, second = (chat(pair, script, stream=stream) for _ in range(2))
    for answer, cached in ((first, 0), (second, row_of(pair, second)["prompt_tokens"] // 16 * 16)):
        assert answer.status_code == 200
        told = [answer.headers[f"x-kagari-{name}"] for name in ("path", "node", "prefill-node")]
        assert told == ["split", "n2", "n1"]
        row = row_of(pair, answer)
        assert (row["path"], row["node"], row["prefill_node"]) == ("split", "n2", "n1")
        assert (row["status"], row["cached_tokens"]) == ("ok", cached)
        assert row["completion_tokens"] == len("hello there")
    assert [one.submit.role for one in pair.nodes["n1"].served] == ["prefill", "prefill"]
    assert pair.nodes["n2"].resident, "what decode has computed it has"


def test_what_is_never_split_is_a_bypass_of_the_decode_node(pair: RunningGateway) -> None:
    answer = chat(pair, {"say": "ok"}, n=2)
    assert answer.headers["x-kagari-path"] == "bypass"
    assert "x-kagari-prefill-node" not in answer.headers
    row = row_of(pair, answer)
    assert (row["path"], row["node"], row["prefill_node"]) == ("bypass", "n2", None)


@pytest.mark.parametrize(("lost", "path", "prefill"), [(1, "split", "n1"), (2, "bypass", None)])
def test_a_transfer_that_fails_shows_in_tries_and_metrics_and_nowhere_else(
    pair: RunningGateway, lost: int, path: str, prefill: str | None
) -> None:
    answer = chat(pair, {"say": "fine", "transfers_lost": lost})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    assert answer.headers["x-kagari-path"] == path
    row = row_of(pair, answer)
    assert (row["status"], row["path"], row["prefill_node"]) == ("ok", path, prefill)
    line = next(
        one for one in pair.log_lines() if one.get("request_id") == answer.headers["x-request-id"]
    )
    assert (line["path"], line["prefill_node"], line["attempts"]) == (path, prefill, lost + 1)
    with pair.client() as client:
        client.headers["authorization"] = f"Bearer {pair.services.home.admin_token}"
        url = pair.addresses.admin_url
        tries = client.get(f"{url}/admin/v1/requests/{row['request_id']}").json()["attempts"]
        text = client.get(f"{url}/metrics").text
        why = client.get(f"{url}/admin/v1/routing/explain?request_id={row['request_id']}").json()
    assert [(one["node"], one["prefill_node"]) for one in tries] == [("n2", "n1")] * lost
    told = [(one["path"], one["pairing"]["prefill_node"]) for one in why["decisions"]]
    assert told == [("split", "n1")] * lost + [(path, prefill)]
    last = why["decisions"][-1]["pairing"]
    assert last["reason"] == ("failed" if path == "bypass" else "always")
    weighed = [] if path == "bypass" else ["n1"]
    assert [one["node_id"] for one in last["candidates"]] == weighed
    assert 'kagari_split_failures_total{code="transfer_lost"}' in text
    assert 'kagari_split_total{outcome="retried"}' in text
    assert f'kagari_paths_total{{model="tiny",path="{path}"}}' in text
    assert 'kagari_node_roles{role="decode"} 1.0' in text


def test_two_precisions_are_both_told(start: Callable[..., Any], tmp_path: Any) -> None:
    with start(tmp_path, ALWAYS, roles=("prefill", "decode")) as gateway:
        assert chat(gateway, {}).headers["x-kagari-precision"] == "q4_1/bf16"
        gateway.nodes["n2"].kv_precision = "int8"
        gateway.call(lambda: gateway.nodes["n2"].socket.transport.abort())
        deadline = time.monotonic() + 10
        while chat(gateway, {}).headers.get("x-kagari-precision") != "q4_1/bf16 > q4_1/int8":
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_between_the_halves_leaves_nothing(
    pair: RunningGateway, stream: bool
) -> None:
    for node in pair.nodes.values():
        node.rules = [("between", {"first_s": 20})]
    body = json.dumps(
        {"model": "tiny", "stream": stream, "messages": [{"role": "user", "content": "between"}]}
    ).encode()
    with pair.connect() as socket:
        socket.sendall(pair.raw(body))
        deadline = time.monotonic() + 10
        while not all(node.served for node in pair.nodes.values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    pair.wait_idle()
    assert all(node.served[0].aborted for node in pair.nodes.values())
    for node in pair.nodes.values():
        node.rules = []


def test_roles_change_under_load_and_no_request_is_lost(
    start: Callable[..., Any], tmp_path: Any
) -> None:
    answers: list[Any] = []
    with start(tmp_path, ALWAYS, roles=("prefill", "decode", "decode")) as gateway:

        def ask() -> None:
            scripts = [{"say": f"{number} of these", "delay_s": 0.005} for number in range(8)]
            answers.extend([chat(gateway, script) for script in scripts])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        with gateway.client() as client:
            client.headers["authorization"] = f"Bearer {gateway.services.home.admin_token}"
            url = f"{gateway.addresses.admin_url}/admin/v1/nodes"
            for node, role in (("n2", "prefill"), ("n1", "decode"), ("n3", "mixed")):
                told = client.post(f"{url}/{node}/role", json={"role": role})
                assert told.status_code == 202
                assert told.json() == {**told.json(), "node_id": node, "next_role": role}
                deadline = time.monotonic() + 15
                while client.get(f"{url}/{node}").json()["next_role"] is not None:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                assert client.get(f"{url}/{node}").json()["role"] == role
        for thread in threads:
            thread.join(30)
        gateway.wait_settled()
        last = chat(gateway, {"say": "x", "pad": PAD})
        assert last.headers["x-kagari-prefill-node"] == "n2"
    assert [answer.status_code for answer in answers] == [200] * 32
    assert {answer.headers["x-kagari-path"] for answer in answers} >= {"split"}
