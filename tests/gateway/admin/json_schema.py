"""As much of JSON Schema as our documents use; a word that is not known here is an error."""

from __future__ import annotations

import re
from typing import Any

KNOWN = {
    *("type", "enum", "anyOf", "$ref", "properties", "required", "additionalProperties", "items"),
    *("minLength", "maxLength", "minimum", "maximum", "pattern", "prefixItems"),
    *("minItems", "maxItems"),
    *("title", "description", "default", "format", "contentEncoding"),  # these only tell
}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:
    """What is wrong with value, each with its place; also a field that no schema names."""
    assert schema.keys() <= KNOWN, f"{at}: {sorted(schema.keys() - KNOWN)}"
    if "$ref" in schema:
        return problems(value, resolve(schema["$ref"], root), root, at)
    if "anyOf" in schema:
        found = [problems(value, one, root, at) for one in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    kind = schema.get("type")
    if kind is not None and not is_a(value, kind):
        return [f"{at}: {value!r} is no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is none of {schema['enum']}"]
    if isinstance(value, str):
        return _text(value, schema, at)
    if isinstance(value, dict):
        return _object(value, schema, root, at)
    if isinstance(value, list) and "items" in schema and schema["items"] is not False:
        return [
            problem
            for i, item in enumerate(value)
            for problem in problems(item, schema["items"], root, f"{at}[{i}]")
        ]
    if isinstance(value, int | float) and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        return [f"{at}: {value} is out of range"]
    return []


def is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, TYPES[kind])


def resolve(reference: str, root: dict[str, Any]) -> dict[str, Any]:
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    assert isinstance(found, dict)
    return found


def _text(value: str, schema: dict[str, Any], at: str) -> list[str]:
    is_right = (
        schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    ) and re.search(schema.get("pattern", ""), value)
    return [] if is_right else [f"{at}: {value!r} does not fit {schema}"]


def _object(
    value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str
) -> list[str]:
    fields = schema.get("properties", {})
    found = [f"{at}.{name} is absent" for name in schema.get("required", ()) if name not in value]
    more = schema.get("additionalProperties", False if fields else {})
    for name, item in value.items():
        if name not in fields and more is False:
            found.append(f"{at}.{name} is in no schema")
        else:
            found += problems(item, fields.get(name, more), root, f"{at}.{name}")
    return found
