"""The price table in force, as the operator reads it."""

from __future__ import annotations

from msgspec import Struct

from gateway.api.exchange import Exchange
from gateway.services import Services
from policies.pricing import PICO_PER_TOKEN_OF_USD_PER_MILLION, Price, Rates

SHIPPED = "the table that ships with Kagari"


class UsdPerMillion(Struct, frozen=True):
    """USD per 1,000,000 tokens, as exact decimals."""

    input: str
    cached: str
    output: str


class PriceLine(Struct, frozen=True):
    """source and date: where and when the price was published."""

    pico_usd_per_token: Rates
    usd_per_million_tokens: UsdPerMillion
    source: str
    date: str


class PricesAnswer(Struct, frozen=True):
    """default is what any model costs that has no line of its own. origin: the table's file."""

    version: str
    origin: str
    default: PriceLine
    models: dict[str, PriceLine]


async def show_prices(services: Services, exchange: Exchange) -> None:
    """Show the price table in force: rates by model, its version and where it came from."""
    table = services.prices
    await exchange.reply_json(
        PricesAnswer(
            version=table.version,
            origin=services.config.models.prices_file or SHIPPED,
            default=_line(table.default),
            models={name: _line(price) for name, price in table.price_by_model.items()},
        )
    )


def _line(price: Price) -> PriceLine:
    rates = price.rates
    usd = UsdPerMillion(*map(usd_per_million, (rates.input, rates.cached, rates.output)))
    return PriceLine(rates, usd, price.source, price.date)


def usd_per_million(pico_usd_per_token: int) -> str:
    """Exact: a rate has at most six decimals, and at least two are shown."""
    whole, rest = divmod(pico_usd_per_token, PICO_PER_TOKEN_OF_USD_PER_MILLION)
    decimals = f"{rest:06d}"
    return f"{whole}.{decimals[:2]}{decimals[2:].rstrip('0')}"
