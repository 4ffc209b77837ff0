"""Where the price table comes from: the operator's file, else the one that ships with Kagari."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from policies.pricing import PriceError, PriceTable, parse_prices


def load_prices(path: Path | None = None) -> PriceTable:
    """The table in `path`, or the shipped one; raises PriceError, which names the file."""
    if path is None:
        return parse_prices((files("policies") / "defaults" / "prices.toml").read_text("utf-8"))
    try:
        return parse_prices(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PriceError(f"price table {path}: {error}") from error
