"""Whole or split: what each mode, each estimate and each bound decides, and who decodes."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

from hypothesis import given
from hypothesis import strategies as st

from policies.pairing import (
    Computing,
    Decoding,
    PairingParameters,
    SplitMode,
    Wanted,
    choose_decoder,
    keep_whole,
    pair,
    parse_parameters,
)

PARAMETERS = PairingParameters()
WANTED = Wanted(prompt_tokens=6000)
WHOLE = Computing("d", 0, uncached_tokens=6000, backlog_tokens=0, tokens_per_s=500.0, decoding=4)
PREFILL = Computing("p", 0, uncached_tokens=6000, backlog_tokens=0, tokens_per_s=500.0)
DECODER = Decoding("d", 0, 6000, 4000, 65_536, bytes_per_token=23_040.0)


def decide(
    whole: Computing = WHOLE,
    prefill: Computing = PREFILL,
    mode: SplitMode = SplitMode.AUTO,
    decoders: tuple[Decoding, ...] = (DECODER,),
):
    return pair(WANTED, whole, prefill, decoders, mode, PARAMETERS)


def test_the_shipped_file_is_the_default() -> None:
    text = files("policies").joinpath("defaults/pairing.toml").read_text("utf-8")
    assert parse_parameters(text) == PARAMETERS


def test_what_is_never_split() -> None:
    auto = SplitMode.AUTO
    assert keep_whole(WANTED, auto) is None
    assert keep_whole(WANTED, SplitMode.NEVER) == "never"
    assert keep_whole(replace(WANTED, lanes=2), SplitMode.ALWAYS) == "lanes"
    assert keep_whole(replace(WANTED, prompt_logprobs=True), auto) == "prompt_logprobs"
    assert keep_whole(replace(WANTED, may_split=False), SplitMode.ALWAYS) == "failed"


def test_a_split_pays_while_others_decode() -> None:
    """Twelve seconds of four streams against a transfer that hides behind the computing."""
    pairing = decide()
    assert (pairing.reason, pairing.decoder) == ("pays", DECODER)
    assert pairing.spared_s == 4 * 12.0
    assert pairing.whole_s == 12.0
    assert pairing.split_s == 12.0 + PARAMETERS.handover_s
    assert 0.13 < pairing.transfer_s < 0.14


def test_nobody_decodes_so_the_transfer_buys_nothing() -> None:
    assert decide(replace(WHOLE, decoding=0)).reason == "slower"


def test_a_queue_before_prefill_can_cost_more_than_the_streams_are_spared() -> None:
    assert decide(prefill=replace(PREFILL, backlog_tokens=25_000)).reason == "slower"
    assert decide(prefill=replace(PREFILL, backlog_tokens=20_000)).reason == "pays"


def test_a_slow_network_can_too() -> None:
    assert decide(decoders=(replace(DECODER, bytes_per_s=2e6),)).reason == "slower"
    slow = decide(decoders=(replace(DECODER, bytes_per_s=5e6),))
    assert slow.reason == "pays"
    assert slow.split_s > slow.transfer_s  # 27.6 s, of which 12 hide


def test_short_prompts_are_computed_where_they_are_decoded() -> None:
    short = replace(WHOLE, uncached_tokens=PARAMETERS.bypass_tokens - 1)
    assert decide(short).reason == "short"
    assert not decide(short).is_split
    assert decide(replace(short, uncached_tokens=PARAMETERS.bypass_tokens)).is_split
    assert decide(short, mode=SplitMode.ALWAYS).reason == "always"


def test_always_needs_a_pair_too() -> None:
    assert decide(mode=SplitMode.ALWAYS, decoders=()).reason == "no_pair"


def test_who_decodes_has_the_emptiest_pool_then_most_of_the_prompt() -> None:
    full = replace(DECODER, node_id="a", context_tokens=40_000, missing_tokens=0)
    near = replace(DECODER, node_id="b", context_tokens=5000, missing_tokens=100)
    assert choose_decoder([full, DECODER, near], 6000, PARAMETERS) == near
    assert choose_decoder([full, DECODER], 6000, PARAMETERS) == DECODER
    wide = replace(full, capacity_tokens=1 << 20)
    assert choose_decoder([wide, DECODER], 6000, PARAMETERS) == wide


computings = st.builds(
    Computing,
    st.just("x"),
    st.just(0),
    st.integers(1, 100_000),
    st.integers(0, 100_000),
    st.floats(1.0, 1e5),
    st.floats(0.0, 10.0),
    st.integers(0, 64),
)
decodings = st.builds(
    Decoding,
    st.sampled_from("abc"),
    st.just(0),
    st.integers(0, 100_000),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.floats(0.0, 1e6),
    st.sampled_from([0.0, 1e6, 1e9]),
)


@given(computings, computings, st.lists(decodings, max_size=4), st.integers(0, 8))
def test_a_choice_says_what_it_rests_on(whole, prefill, decoders, more) -> None:
    pairing = pair(WANTED, whole, prefill, decoders, SplitMode.AUTO, PARAMETERS)
    assert pairing.is_split == (pairing.reason == "pays")
    if pairing.reason in ("pays", "slower"):
        assert pairing.is_split == (pairing.spared_s > pairing.split_s - pairing.whole_s)
        assert pairing.split_s >= prefill.first_token_s
        # The more decode where it would be computed, the sooner it is split.
        busier = replace(whole, decoding=whole.decoding + more)
        if pairing.is_split:
            assert pair(WANTED, busier, prefill, decoders, SplitMode.AUTO, PARAMETERS).is_split
