"""The price table that ships with Kagari, and an operator's own."""

import pytest

from gateway.ledger.prices import load_prices
from policies.pricing import PriceError, Rates


def test_the_shipped_table_holds_the_published_prices():
    table = load_prices()
    assert table.rates("@cf/moonshotai/kimi-k2.6") == Rates(950_000, 160_000, 4_000_000)
    assert table.rates("@cf/deepseek-ai/deepseek-v4-flash-0731").cached == 14_000
    assert table.rates("@cf/qwen/qwen3-30b-a3b-fp8") == Rates(51_000, 51_000, 335_000)
    assert len(table.price_by_model) == 19
    assert all(price.source and price.date for price in table.price_by_model.values())


def test_the_default_models_are_priced_and_any_other_local_model_too():
    table = load_prices()
    assert {"smollm2-135m", "smollm2-135m-32k"} <= table.price_by_model.keys()
    for model in ("smollm2-135m", "smollm2-135m-32k", "a-folder-of-mine"):
        assert table.rates(model) == Rates(20_000, 4_000, 40_000)


def test_an_operators_table_replaces_it_and_its_errors_name_the_file(tmp_path):
    own = tmp_path / "prices.toml"
    own.write_text(
        'version = "mine"\n[default]\ninput = 1\noutput = 2\nsource = "me"\ndate = "d"\n'
    )
    assert load_prices(own).rates("m") == Rates(1_000_000, 1_000_000, 2_000_000)
    own.write_bytes(b"\xff")
    with pytest.raises(PriceError, match=r"prices\.toml"):
        load_prices(own)
    with pytest.raises(PriceError, match=r"absent\.toml"):
        load_prices(tmp_path / "absent.toml")
