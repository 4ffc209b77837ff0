"""A request's body or query string as a typed value, or an error that names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo

from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, near, quote

MAX_QUERY_FIELDS = 64
Typed = TypeVar("Typed", bound=Struct)


def decoded(data: bytes, decode: Callable[[bytes], Typed], *, needs: str) -> Typed:
    """The body by its type; raises GatewayError (400) that names the field."""
    if not data or data.isspace():
        raise GatewayError(
            "missing_body",
            field="body",
            found="nothing",
            allowed="a JSON object",
            remedy=f"send {needs}",
        )
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), "body", {}, {}) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error) if isinstance(error, msgspec.DecodeError) else "text that is not UTF-8"
        raise GatewayError(
            "invalid_json",
            field="body",
            found=reason[:200],
            allowed="one JSON object in UTF-8 without lone surrogates, NaN or Infinity",
            remedy="encode the body with a JSON library",
        ) from None


def read_query(exchange: Exchange, kind: type[Typed]) -> Typed:
    """The query string as this struct; a tuple is written with commas. Raises GatewayError."""
    text = exchange.scope["query_string"].decode("latin-1")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
    except ValueError:
        raise refuse_field(
            "query", "too many fields", f"at most {MAX_QUERY_FIELDS}", "send fewer"
        ) from None
    for name, value in pairs:
        if name in values:
            raise refuse_field(quote(name), "it twice", "it once", "send it once")
        is_tuple = name in fields and get_origin(fields[name].type) is tuple
        values[name] = value.split(",") if is_tuple else value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), "query", fields, values) from None


def _choices(kind: Any) -> list[str]:
    """The values of the literals in a type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in _choices(part)]


def refuse_field(field: str, found: str, allowed: str, remedy: str) -> GatewayError:
    return GatewayError("invalid_request", field=field, found=found, allowed=allowed, remedy=remedy)


def _invalid(
    message: str, whole: str, fields: Mapping[str, FieldInfo], values: Mapping[str, Any]
) -> GatewayError:
    """msgspec's "Expected `int`, got `str` - at `$.limit`" in four parts.

    fields and values of the whole, where a misspelt name or value should be told the right ones.
    """
    reason, _, path = message.partition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".") or whole
    named = reason.rsplit("`", 2)[1] if reason.endswith("`") else ""
    if reason.startswith("Object missing required field"):
        name = named if field == whole else f"{field}.{named}"
        return refuse_field(name, "nothing", "a value", "add the field")
    if reason.startswith("Object contains unknown field"):
        nearest = near(named, list(fields))
        remedy = f"did you mean {nearest[0]}?" if nearest else "leave it out"
        return refuse_field(quote(named), "an unknown field", "the documented fields", remedy)
    if reason.startswith("Invalid enum value "):
        name = field.partition("[")[0]
        choices = ", ".join(_choices(fields[name].type)) if name in fields else ""
        found = reason.removeprefix("Invalid enum value ")
        return refuse_field(field, found, choices or "a documented value", "choose one of them")
    allowed, separator, found = reason.partition(", got ")
    if separator or reason.startswith("Expected "):
        allowed = allowed.removeprefix("Expected ").replace("`", "")
        shown = quote(str(values[field])) if field in values else "another value"
        return refuse_field(field, found.replace("`", "") or shown, allowed, "mend the field")
    return refuse_field(
        field, reason.replace("`", ""), "a value of the documented type", "mend the field"
    )
