"""Several choices and prompts through real processes: one bill, log probabilities, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.demo.stack import Stack

Balanced = Callable[[Stack], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def stack(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("choices") / "home"
    with Stack(home, "--nodes", "2", "--port", "0", "--script", str(script)) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.ready["url"], api_key=stack.api.secret, max_retries=0) as sdk:
        yield sdk


def test_three_choices_share_one_prompt(
    stack: Stack, client: openai.OpenAI, balanced: Balanced
) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        n=3,
        logprobs=True,
        top_logprobs=1,
    )
    said = "The capital of France is Paris."
    assert [choice.message.content for choice in answer.choices] == [said] * 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert {entry.logprob for entry in choice.logprobs.content} == {0.0}
        told = "".join(entry.token for entry in choice.logprobs.content)
        assert told == said + "<|im_end|>"  # the stop token is told of, and counted
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3 * len(choice.logprobs.content)
    row = balanced(stack)[-1]
    assert (row["prompt_tokens"], row["completion_tokens"]) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )


def test_a_batch_with_echo_tells_every_token_of_its_prompts(
    stack: Stack, client: openai.OpenAI, balanced: Balanced
) -> None:
    prompts = [f"Prompt {number} ends here." for number in range(20)]
    answer = client.completions.create(
        model=stack.model, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    assert [choice.index for choice in answer.choices] == list(range(20))
    tokens = 0
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text.startswith(prompt)
        told = choice.logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.token_logprobs[0] is None
        assert set(told.token_logprobs[1:]) == {0.0}
        assert "".join(told.tokens or ()) == choice.text
        tokens += len(told.tokens or ())
    assert answer.usage is not None
    assert answer.usage.total_tokens == tokens
    row = balanced(stack)[-1]
    assert row["prompt_tokens"] == answer.usage.prompt_tokens == tokens - 20
    assert (row["cached_tokens"], row["completion_tokens"]) == (0, 20)


def test_an_engine_that_dies_ends_all_choices_and_bills_none(
    stack: Stack, client: openai.OpenAI, balanced: Balanced
) -> None:
    stream = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "a fatal question"}],
        n=3,
        stream=True,
    )
    events: list[Any] = []
    with pytest.raises(openai.APIError):
        events.extend(stream)
    assert {choice.index for event in events for choice in event.choices} == {0, 1, 2}
    row = balanced(stack)[-1]
    assert (row["status"], row["charge_nano_usd"]) == ("failed", 0)
