"""What tokens cost: a versioned price table and integer charges, without a float anywhere.

Rates are pico-USD per token, charges are nano-USD. 1 USD per 1,000,000 tokens is 1,000,000 pico-USD
per token, so a price with at most six decimals is a whole rate. A charge is rounded once, half up.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from msgspec import Struct

from policies.contract.wire import Usage

PICO_PER_NANO = 1_000
PICO_PER_TOKEN_OF_USD_PER_MILLION = 1_000_000
MAX_USD_PER_MILLION = 1_000_000  # keeps any charge far inside SQLite's 64-bit integers


class PriceError(ValueError):
    """A price table that cannot be used; the message names the field and the remedy."""


class Rates(Struct, frozen=True):
    """pico-USD per token. cached is what a prompt token found in the prefix cache costs."""

    input: int
    cached: int
    output: int


class Charge(Struct, frozen=True):
    """nano-USD: full (nothing cached) less discount is bill, exactly."""

    full: int
    discount: int
    bill: int


@dataclass(frozen=True, slots=True)
class Price:
    """One model's rates, where they were published and on which day."""

    rates: Rates
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices by served model name; any other model costs the default."""

    version: str
    default: Price
    price_by_model: Mapping[str, Price]

    def price(self, model: str) -> Price:
        return self.price_by_model.get(model, self.default)

    def rates(self, model: str) -> Rates:
        return self.price(model).rates


def charge_nano_usd(usage: Usage, rates: Rates) -> int:
    """The bill of one request. prompt_tokens includes cached_tokens; ValueError if it cannot."""
    uncached = usage.prompt_tokens - usage.cached_tokens
    if min(uncached, usage.cached_tokens, usage.completion_tokens) < 0:
        raise ValueError(f"usage: found {usage}; allowed 0 <= cached <= prompt and completion >= 0")
    return _nano(
        uncached * rates.input
        + usage.cached_tokens * rates.cached
        + usage.completion_tokens * rates.output
    )


def charge(usage: Usage, rates: Rates) -> Charge:
    """The bill beside what it would have been without the prefix cache.

    The discount is the difference of the two rounded amounts, so sums of rows balance exactly.
    """
    cold = Usage(usage.prompt_tokens, 0, usage.completion_tokens)
    full, bill = charge_nano_usd(cold, rates), charge_nano_usd(usage, rates)
    return Charge(full, full - bill, bill)


def usd(nano: int) -> str:
    """An amount in USD, exactly, with all nine decimals; a JSON number as it stands."""
    return f"{'-' if nano < 0 else ''}{abs(nano) // 10**9}.{abs(nano) % 10**9:09d}"


def _nano(pico: int) -> int:
    return (pico + PICO_PER_NANO // 2) // PICO_PER_NANO


def parse_prices(text: str) -> PriceTable:
    """A price table from the text of prices.toml; raises PriceError."""
    try:
        document = tomllib.loads(text, parse_float=Decimal)
    except (tomllib.TOMLDecodeError, InvalidOperation) as error:
        raise PriceError(f"prices: not TOML: {error}; correct the file") from error
    _only(document, {"version", "default", "models"}, "prices")
    version = _text(document, "version", "prices")
    models = document.get("models", {})
    if not isinstance(models, dict):
        raise PriceError('prices.models: must be tables; write [models."name"]')
    return PriceTable(
        version,
        _price(document.get("default"), "default"),
        {name: _price(entry, f"models.{name!r}") for name, entry in models.items()},
    )


def _price(entry: object, where: str) -> Price:
    if not isinstance(entry, dict):
        raise PriceError(f"{where}: absent; add a table with input, output, source and date")
    _only(entry, {"input", "cached", "output", "source", "date"}, where)
    rate_input = _rate(entry, "input", where)
    cached = _rate(entry, "cached", where) if "cached" in entry else rate_input
    if cached > rate_input:
        raise PriceError(
            f"{where}.cached: found {entry['cached']}; allowed at most input ({entry['input']}); "
            "leave cached out to bill cached tokens as input"
        )
    rates = Rates(rate_input, cached, _rate(entry, "output", where))
    return Price(rates, _text(entry, "source", where), _text(entry, "date", where))


def _rate(entry: Mapping[str, object], field: str, where: str) -> int:
    """USD per 1,000,000 tokens (a TOML number or a decimal string) as pico-USD per token."""
    found = entry.get(field)
    allowed = f"allowed a number from 0 to {MAX_USD_PER_MILLION} with at most six decimals"
    refusal = PriceError(f"{where}.{field}: found {found!r}; {allowed}, in USD per 1M tokens")
    if isinstance(found, bool) or not isinstance(found, int | str | Decimal):
        raise refusal
    try:
        usd = Decimal(found)
    except InvalidOperation as error:
        raise refusal from error
    if not usd.is_finite() or not 0 <= usd <= MAX_USD_PER_MILLION:
        raise refusal
    numerator, denominator = usd.as_integer_ratio()  # exact: no decimal context rounds it
    rate, rest = divmod(numerator * PICO_PER_TOKEN_OF_USD_PER_MILLION, denominator)
    if rest:
        raise refusal
    return rate


def _text(entry: Mapping[str, object], field: str, where: str) -> str:
    found = entry.get(field)
    if not isinstance(found, str) or not found:
        raise PriceError(f'{where}.{field}: found {found!r}; write {field} = "…"')
    return found


def _only(entry: Mapping[str, object], allowed: set[str], where: str) -> None:
    if unknown := sorted(set(entry) - allowed):
        raise PriceError(f"{where}: unknown {unknown}; allowed {sorted(allowed)}")
