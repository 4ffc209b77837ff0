"""The embedded model end to end: Paris, a cached second turn through the openai SDK, the demo."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from gateway.cli.children import python_module
from gateway.demo.scenario import next_question, system_prompt
from gateway.demo.stack import Stack
from policies.contract.wire import Usage
from policies.pricing import Rates, charge_nano_usd

Balanced = Callable[[Stack], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Without slower tiers: two nodes that share their host's memory are as near as a home."""
    home = tmp_path_factory.mktemp("real") / "home"
    flags = ("--nodes", "2", "--port", "0", "--kv-device-tokens", "8192")
    with Stack(home, *flags, "--kv-host-mb", "0", "--kv-disk-mb", "0") as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.ready["url"], api_key=stack.api.secret) as sdk:
        yield sdk


def test_the_capital_of_france(stack: Stack, client: openai.OpenAI, balanced: Balanced) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=32,
        temperature=0,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert balanced(stack)[-1]["status"] == "ok"


def test_generate_speaks_to_an_engine_without_a_gateway() -> None:
    ask = ("engine", "generate", "smollm2-135m", "What is the capital of France?")
    command = python_module("gateway.cli.main", *ask, "--max-tokens", "16")
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stderr
    told = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    answer = json.loads(told.stdout)
    assert answer["text"] + "\n" == shown.stdout
    assert "Paris" in answer["text"]
    assert (answer["model"], answer["finish_reason"]) == ("smollm2-135m", "stop")
    assert answer["completion_tokens"] <= 16 < answer["prompt_tokens"]


def test_the_second_turn_is_cached_on_the_same_node_and_charged_by_the_formula(
    stack: Stack, client: openai.OpenAI, balanced: Balanced
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": system_prompt()[:2400]},
        {"role": "user", "content": next_question(0, 1)},
    ]
    usages, nodes, affinities = [], [], []
    for _ in range(2):
        text = ""
        with client.chat.completions.with_streaming_response.create(
            model=stack.model,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-session-affinity": "two-turns"},
        ) as response:
            nodes.append(response.headers["x-kagari-node"])
            affinities.append(response.headers["x-kagari-affinity"])
            for chunk in response.parse():
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                if chunk.usage is not None:
                    usages.append(chunk.usage)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": next_question(0, 2)},
        ]
    first, second = usages
    assert first.prompt_tokens >= 320
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= 0.8 * first.prompt_tokens
    assert nodes[0] == nodes[1]
    assert affinities == ["new", "hit"]

    rows = balanced(stack)[-2:]
    for row, usage in zip(rows, usages, strict=True):
        told = Usage(
            usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
        )
        assert Usage(row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == told
        assert row["charge_nano_usd"] == charge_nano_usd(told, Rates(**row["rates"]))


def test_greedy_is_the_same_cold_and_warm_and_on_the_other_node(
    stack: Stack, client: openai.OpenAI
) -> None:
    def ask(session: str) -> str:
        answer = client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "Name three rivers in Europe. " * 20}],
            max_tokens=24,
            temperature=0,
            extra_headers={"x-session-affinity": session},
        )
        return answer.choices[0].message.content or ""

    assert len({ask(f"session-{index // 2}") for index in range(6)}) == 1


def test_the_demos_claims_hold() -> None:
    """Short: `make prove` runs all of it."""
    short = ("--turns", "3", "--landing-tokens", "600")
    done = subprocess.run(
        python_module("gateway.cli.main", "demo", "--check", "--json", *short),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout, done.stderr
    acts = json.loads(done.stdout)["acts"]
    claims = [claim for act in acts for claim in act["claims"]]
    # What depends on the machine's rest is for `make prove`, which runs the demo alone.
    assert [claim["text"] for claim in claims if not claim["ok"] and not claim["timed"]] == []
    names = ["affinity", "discount", "landing", "tiers"]
    assert [act["name"] for act in acts] == names
    assert len(acts[0]["rows"]) == 24
    assert [row["path"] for row in acts[2]["rows"]] == ["mixed", "mixed", "split"]
    assert done.returncode == (0 if all(claim["ok"] for claim in claims) else 1)
