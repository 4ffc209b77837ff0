"""Prices are whole pico-USD per token; a bill is rounded once and full price - discount = bill."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.contract.wire import Usage
from policies.pricing import (
    Charge,
    PriceError,
    Rates,
    charge,
    charge_nano_usd,
    parse_prices,
    usd,
)

HEAD = 'version = "v1"\n[default]\ninput = 0.02\noutput = 0.04\nsource = "s"\ndate = "d"\n'


@st.composite
def rates(draw):
    rate_input = draw(st.integers(0, 10**9))
    return Rates(rate_input, draw(st.integers(0, rate_input)), draw(st.integers(0, 10**9)))


@st.composite
def usages(draw):
    prompt = draw(st.integers(0, 10**7))
    return Usage(prompt, draw(st.integers(0, prompt)), draw(st.integers(0, 10**6)))


@given(usages(), rates())
def test_a_bill_is_the_exact_sum_rounded_once_half_up(usage, price):
    exact = Fraction(
        (usage.prompt_tokens - usage.cached_tokens) * price.input
        + usage.cached_tokens * price.cached
        + usage.completion_tokens * price.output,
        1000,
    )
    assert charge_nano_usd(usage, price) == (exact + Fraction(1, 2)).__floor__()


@pytest.mark.parametrize(("pico", "nano"), [(499, 0), (500, 1), (1499, 1), (1500, 2), (2500, 3)])
def test_half_a_nano_usd_is_rounded_up_not_to_even(pico, nano):
    assert charge_nano_usd(Usage(1, 0, 0), Rates(pico, pico, 0)) == nano


@given(st.lists(st.tuples(usages(), rates()), max_size=20))
def test_full_price_less_discount_is_the_bill_in_rows_and_in_sums(rows):
    charges = [charge(usage, price) for usage, price in rows]
    for (usage, price), found in zip(rows, charges, strict=True):
        assert found.bill == charge_nano_usd(usage, price)
        assert found.full - found.discount == found.bill
        assert 0 <= found.discount <= found.full
    sums = Charge(*(sum(getattr(c, name) for c in charges) for name in Charge.__struct_fields__))
    assert sums.full - sums.discount == sums.bill


@given(usages(), rates(), st.integers(0, 1000))
def test_more_tokens_never_cost_less_and_more_cached_never_cost_more(usage, price, more):
    bill = charge_nano_usd(usage, price)
    longer = Usage(usage.prompt_tokens + more, usage.cached_tokens, usage.completion_tokens + more)
    assert charge_nano_usd(longer, price) >= bill
    cached = min(usage.prompt_tokens, usage.cached_tokens + more)
    assert charge_nano_usd(Usage(usage.prompt_tokens, cached, 0), price) <= charge_nano_usd(
        Usage(usage.prompt_tokens, usage.cached_tokens, 0), price
    )


def test_prompt_tokens_already_include_cached_tokens():
    assert charge_nano_usd(Usage(1000, 1000, 0), Rates(20_000, 4_000, 0)) == 4_000


@pytest.mark.parametrize(
    "usage", [Usage(1, 2, 0), Usage(-1, 0, 0), Usage(1, -1, 0), Usage(1, 0, -1)]
)
def test_impossible_usage_is_refused(usage):
    with pytest.raises(ValueError, match="0 <= cached <= prompt"):
        charge_nano_usd(usage, Rates(1, 1, 1))


@given(st.decimals(0, 1_000_000, places=6))
def test_every_published_price_is_exact(price):
    number = f"{price:f}"
    for written in (number, f'"{number}"'):
        table = parse_prices(
            HEAD + f'[models.m]\ninput = {written}\noutput = 0\nsource="s"\ndate="d"'
        )
        assert table.rates("m").input == price * 1_000_000
        assert table.rates("m").cached == table.rates("m").input


@given(st.integers(-(10**18), 10**18))
def test_an_amount_in_usd_is_exact_and_a_json_number(nano):
    assert Fraction(usd(nano)) * 10**9 == nano
    assert json.loads(usd(nano), parse_float=Fraction) == Fraction(nano, 10**9)


def test_no_cached_rate_is_the_input_rate_and_an_unknown_model_costs_the_default():
    table = parse_prices(HEAD)
    assert table.rates("anything") == Rates(20_000, 20_000, 40_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = ", "not TOML"),
        ('version = "v"', "default: absent"),
        (HEAD.replace('version = "v1"\n', ""), "prices.version"),
        (HEAD.replace("0.02", "0.0000001"), "default.input.*six decimals"),
        (HEAD.replace("0.02", "nan"), "default.input"),
        (HEAD.replace("0.02", "-1"), "default.input"),
        (HEAD.replace("0.02", "1e99"), "default.input"),
        (HEAD.replace("0.02", "true"), "default.input"),
        (HEAD.replace("0.02", '"cheap"'), "default.input"),
        (HEAD.replace("input", "inptu"), "unknown.*inptu"),
        (HEAD + "cached = 0.03", "default.cached.*at most input"),
        (HEAD + "[modles.m]", "unknown.*modles"),
        ("models = 3\n" + HEAD, "must be tables"),
    ],
)
def test_a_bad_table_is_refused_with_its_field(text, message):
    with pytest.raises(PriceError, match=message):
        parse_prices(text)
