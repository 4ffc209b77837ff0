"""Tools of a chat request: which of them the model is shown, and what is refused.

Calls are not constrained: `auto` and `none` are all a client may choose. A tool of a type that runs
elsewhere (`web_search`) is left out and told in x-kagari-changed: harnesses send them to everyone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from gateway.api.sampling_request import SamplingBody, invalid, unsupported
from gateway.errors import quote

MAX_TOOLS = 256
NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
SHOWN = ("name", "description", "parameters")  # `strict` and the like are not for the model


class ResponseFormat(Struct, frozen=True):
    type: str


class ToolsBody(SamplingBody, frozen=True, kw_only=True):
    """The wire form. Types only; the rest is checked in `read_tools`."""

    tools: list[dict[str, object]] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    functions: list[object] | None = None
    function_call: object = None
    response_format: ResponseFormat | None = None


@dataclass(frozen=True, slots=True)
class ToolsRequest:
    """Function definitions for the prompt, their keys in the client's order."""

    functions: tuple[Mapping[str, object], ...]
    one_call: bool  # the answer ends with its first call
    changed: tuple[str, ...]  # what was left out

    def headers(self) -> list[tuple[str, str]]:
        return [("x-kagari-changed", changed) for changed in self.changed]


NO_TOOLS = ToolsRequest((), one_call=False, changed=())


def read_tools(body: ToolsBody) -> ToolsRequest:
    """Raises GatewayError (400) that names the field."""
    _refuse_unsupported(body)
    # With "none" not shown: a model that sees tools calls them, and no parser would know the call.
    shown = [] if body.tool_choice == "none" else body.tools or []
    return read_functions(shown, one_call=body.parallel_tool_calls is False)


def read_functions(
    tools: Sequence[Mapping[str, object]], *, one_call: bool = False
) -> ToolsRequest:
    """Raises GatewayError (400) that names the field."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}", "send fewer")
    functions: list[Mapping[str, object]] = []
    dropped: list[str] = []
    loose = 0
    for index, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if kind != "function":
            dropped.append(kind if isinstance(kind, str) and NAME.fullmatch(kind) else "unknown")
            continue
        function = _function(tool.get("function"), f"tools[{index}].function")
        loose += function.get("strict") is True
        functions.append({name: value for name, value in function.items() if name in SHOWN})
    return ToolsRequest(tuple(functions), one_call, _told(dropped, loose))


def _told(dropped: Sequence[str], loose: int) -> tuple[str, ...]:
    changed = []
    if dropped:
        changed.append("tools dropped: " + " ".join(list(dict.fromkeys(dropped))[:8]))
    if loose:
        changed.append(f"strict true -> false in {loose} tools")
    return tuple(changed)


def _function(function: object, field: str) -> Mapping[str, object]:
    if not isinstance(function, dict):
        raise invalid(
            field,
            "nothing" if function is None else "no object",
            "an object with name, description and parameters",
            'send {"type": "function", "function": {"name": …}}',
        )
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            f"{field}.name",
            quote(name) if isinstance(name, str) else "no string",
            "1 to 128 letters, digits and _ . : / -",
            "rename the function",
        )
    for key, kind, allowed in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON Schema object"),
    ):
        if not isinstance(function.get(key), kind | None):
            raise invalid(f"{field}.{key}", "another type", allowed, "mend it or leave it out")
    return function


def _refuse_unsupported(body: ToolsBody) -> None:
    choice = body.tool_choice
    if choice is not None and choice not in ("auto", "none"):
        if choice != "required" and not isinstance(choice, dict):
            raise invalid("tool_choice", "no known choice", '"auto" or "none"', "leave it out")
        raise unsupported(
            "tool_choice",
            '"required"' if choice == "required" else "a named tool",
            '"auto" or "none"',
            'send "auto" and ask for the call in the prompt',
        )
    if body.functions:
        raise unsupported(
            "functions", f"{len(body.functions)} functions", "tools", "send them as tools"
        )
    if body.function_call not in (None, "none", "auto"):
        raise unsupported(
            "function_call", "a forced function", "tool_choice", 'send "tool_choice": "auto"'
        )
    if body.response_format is not None and body.response_format.type != "text":
        kind = body.response_format.type
        if kind not in ("json_object", "json_schema"):
            raise invalid("response_format.type", quote(kind), '"text"', "leave it out")
        raise unsupported(
            "response_format.type", quote(kind), '"text"', "ask for JSON in the prompt instead"
        )
