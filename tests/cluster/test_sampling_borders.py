"""What the gateway lets a client ask for, the engine takes: both ends of every range meet."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.submit import check_submit
from gateway.api.completions_request import read_completion_request
from gateway.config import LimitsConfig
from policies.contract.wire import Submit, pack_ids

VOCAB_SIZE = 100
LIMITS = LimitsConfig()

EDGES: list[dict[str, Any]] = [
    {"repetition_penalty": 0.0001},
    {"repetition_penalty": 10_000},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"presence_penalty": 2, "frequency_penalty": -2},
    {"logit_bias": {"0": -100, "99": 100}},
    {"logit_bias": {str(id_): 1 for id_ in range(VOCAB_SIZE)}},
    {"temperature": 0, "top_k": -1, "min_p": 0},
    {"temperature": 2, "top_k": (1 << 31) - 1, "min_p": 1, "top_p": 1e-300},
    {"seed": -(1 << 63)},
    {"seed": (1 << 63) - 1},
    {"n": LIMITS.choices},
    {"logprobs": 20, "echo": True},
    {"logprobs": 0, "echo": True, "max_tokens": 0},
    {"max_tokens": 1 << 40, "min_tokens": 1 << 40},
]


@pytest.mark.parametrize("fields", EDGES, ids=str)
def test_the_engine_takes_every_edge_that_the_gateway_allows(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    request = read_completion_request(body, LIMITS)
    text = cast(Any, SimpleNamespace(vocab_size=VOCAB_SIZE, stop_token_ids=(2,)))
    submit = Submit(
        request_id="r",
        attempt=1,
        engine=0,
        lanes=tuple(range(request.sampling.n)),
        prompt=pack_ids(array("I", [1, 2, 3])),
        salt=bytes(32),
        sampling=request.sampling.to_wire(text, max_tokens=50, seed=request.sampling.seed or 0),
        deadline_s=1.0,
    )
    prompt, transfer = check_submit(submit, VOCAB_SIZE, draining=False, moves=False)
    assert (list(prompt), transfer) == ([1, 2, 3], None)
