"""Finds tool calls in a completion as it comes, in the Hermes form, and passes their arguments on.

    <tool_call>
    {"name": "ls", "arguments": {"path": "."}}
    </tool_call>

A call starts at once when its name is there; arguments follow as JSON text, as they come. Any
chunking gives the same whole. What turns out to be no call (no object, no name) is text, unchanged;
after a start what is no JSON is still passed on as the arguments, for the client to judge, as it
judges names: tools may have been dropped or renamed since, and it can tell the model which exist.
Space that frames calls, one newline before a call and all between two, belongs to them: templates
write it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, Literal

from gateway.text.deltas import CallArguments, CallStart, Delta, Text
from gateway.text.json_scan import ValueScan

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MAX_HELD_CHARS = 1 << 18  # of one call: kept until its name is known
MAX_FRAME_CHARS = 256
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_OPEN: Final = re.compile(OPEN)
_EITHER: Final = re.compile(f"{OPEN}|{CLOSE}")


Role = Literal["key", "name", "arguments", "other"]


class ToolCallParser:
    """One choice's stream. draw_id gives each call its id."""

    def __init__(self, draw_id: Callable[[], str]) -> None:
        self.calls = 0  # finished ones
        self._draw_id = draw_id
        self._deltas: list[Delta] = []
        self._mode: Literal["text", "call", "broken"] = "text"
        self._held = ""  # what may be the beginning of a mark
        self._space = ""  # said, if no call comes after it
        self._is_after_call = False  # nothing but space came since
        self._is_block_open = False  # a call has ended, its mark did not come yet
        self._num_started = 0
        self._call = _Call()

    def push(self, text: str) -> list[Delta]:
        if self._is_plain(text):
            return [Text(text)] if text else []
        if self._held:
            text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            match self._mode:
                case "text":
                    at = self._in_text(text, at)
                case "call":
                    at = self._in_call(text, at)
                case "broken":
                    at = self._in_broken(text, at)
        return self._take()

    def flush(self) -> list[Delta]:
        """The rest, at the end of the stream. A call that is cut short counts as none."""
        held, self._held = self._held, ""
        call = self._call
        if self._mode == "text":
            self._say(held)
        elif not call.is_started:
            self._say("".join(call.raw))
        elif call.has_arguments:
            self._finish()
        elif self._mode == "broken":
            self._pass_on(held)
        elif call.role == "arguments" and call.scan is not None:
            self._pass_on("".join(call.kept) + call.scan.rest())
        if self._space and not self._is_after_call:
            self._add(Text(self._space))
        self._space = ""
        return self._take()

    def _is_plain(self, text: str) -> bool:
        """Most text: it can neither begin a mark nor frame a call."""
        held = self._held or self._space or self._is_after_call
        return self._mode == "text" and not held and "<" not in text and not text.endswith("\n")

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else None
        if isinstance(delta, Text) and isinstance(last, Text):
            self._deltas[-1] = Text(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            self._deltas[-1] = CallArguments(delta.index, last.text + delta.text)
        else:
            self._deltas.append(delta)

    # --- text -----------------------------------------------------------------------------------

    def _in_text(self, text: str, at: int) -> int:
        marks = _EITHER if self._is_block_open else _OPEN
        found = marks.search(text, at)
        if found is None:
            return self._hold(text, at, self._say)
        self._say(text[at : found.start()])
        if found[0] == CLOSE:
            self._is_block_open = False
            if self._is_after_call:
                self._space = ""
        else:
            self._call = _Call()
            self._call.keep(OPEN)
            self._mode = "call"
        return found.end()

    def _hold(self, text: str, at: int, give: Callable[[str], None]) -> int:
        """Give the text from at on, but for an end that may become a mark."""
        start = text.rfind("<", max(at, len(text) - len(CLOSE) + 1))
        if start == -1 or not any(mark.startswith(text[start:]) for mark in (OPEN, CLOSE)):
            start = len(text)
        give(text[at:start])
        self._held = text[start:]
        return len(text)

    def _say(self, text: str) -> None:
        text, self._space = self._space + text, ""
        if self._is_after_call and not text.strip() and len(text) <= MAX_FRAME_CHARS:
            self._space = text
            return
        self._is_after_call = False
        if text.endswith("\n"):
            text, self._space = text[:-1], "\n"
        if text:
            self._add(Text(text))

    # --- a call ---------------------------------------------------------------------------------

    def _in_call(self, text: str, at: int) -> int:
        call = self._call
        if call.scan is not None:
            return self._in_value(call, call.scan, text, at)
        end = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        end = min(end, at + call.room(len(text)))
        call.keep(text[at:end])
        if end == len(text):
            return end
        char, wanted = text[end], call.wanted
        if not call.room(1):
            return self._fail(end)
        if wanted == "value":
            call.begin_value(char)
            return end
        if wanted == "{" and char == "{":
            call.wanted = "key or }"
        elif wanted in ("key", "key or }") and char == '"':
            call.begin("key")
            return end
        elif wanted == ":" and char == ":":
            call.wanted = "value"
        elif wanted == ", or }" and char == ",":
            call.wanted = "key"
        elif wanted == ", or }" and char == "}" and call.is_started:
            self._finish()
            return end + 1
        else:
            return self._fail(end)
        call.keep(char)
        return end + 1

    def _in_value(self, call: _Call, scan: ValueScan, text: str, at: int) -> int:
        room = call.room(len(text) - at)
        if not room:
            return self._fail(at)
        end, status = scan.feed(text[: at + room] if at + room < len(text) else text, at)
        call.keep(text[at:end])
        if call.is_streamed:
            self._pass_on(scan.passed)
        else:
            call.keep_value(scan.passed)
        if status == "bad":
            return self._fail(end)
        if status == "done":
            call.scan = None
            if not self._take_value(call, "".join(call.kept)):
                return self._fail(end)
        return end

    def _take_value(self, call: _Call, value: str) -> bool:
        """A key or a value has ended: False when the object is no call by it."""
        call.kept.clear()
        call.wanted = ", or }"
        match call.role:
            case "key":
                call.key = _text_of(value)
                call.wanted = ":"
            case "name":
                name = _text_of(value) if value.startswith('"') else ""
                if not name:
                    return False
                self._start(name)
            case "arguments":
                call.has_arguments = True
                if not call.is_streamed:
                    call.arguments = _arguments_of(value)
                    if call.is_started:
                        self._pass_on(call.arguments)
            case "other":
                pass
        return True

    def _start(self, name: str) -> None:
        call = self._call
        call.is_started = True
        call.raw.clear()
        self._space = ""
        self._add(CallStart(self._num_started, self._draw_id(), name))
        self._num_started += 1
        if call.has_arguments:
            self._pass_on(call.arguments)

    def _pass_on(self, text: str) -> None:
        if text:
            self._call.is_passed_on = True
            self._add(CallArguments(self._num_started - 1, text))

    def _finish(self) -> None:
        if not self._call.is_passed_on:
            self._pass_on("{}")
        self.calls += 1
        self._is_after_call = self._is_block_open = True
        self._mode = "text"

    def _fail(self, at: int) -> int:
        """At what is no JSON: the call was none, is over, or goes on as text of its arguments."""
        call = self._call
        if not call.is_started:
            self._mode = "text"
            self._say("".join(call.raw))
        elif call.has_arguments:
            self._finish()
        else:
            if call.role == "arguments":
                self._pass_on("".join(call.kept))
            self._mode = "broken"
        return at

    def _in_broken(self, text: str, at: int) -> int:
        found = _EITHER.search(text, at)
        if found is None:
            return self._hold(text, at, self._pass_on)
        self._pass_on(text[at : found.start()])
        self._finish()
        return found.start()


class _Call:
    """What is known of the call that is being read."""

    def __init__(self) -> None:
        self.raw: list[str] = []  # all of it, until it starts
        self.wanted: Literal["{", "key or }", "key", ":", "value", ", or }"] = "{"
        self.scan: ValueScan | None = None
        self.role: Role = "other"
        self.key = ""
        self.kept: list[str] = []  # of the value that is being read
        self.is_streamed = False
        self.is_started = False
        self.has_arguments = False
        self.is_passed_on = False
        self.arguments = ""  # that came before the name
        self._num_held = 0

    def begin(self, role: Role) -> None:
        self.scan, self.role, self.is_streamed = ValueScan(), role, False

    def begin_value(self, char: str) -> None:
        if self.key == "name" and not self.is_started:
            self.begin("name")
        elif self.key in ("arguments", "parameters") and not self.has_arguments:
            self.begin("arguments")
            self.is_streamed = self.is_started and char in "{["
        else:
            self.begin("other")

    def room(self, wanted: int) -> int:
        """How many of the wanted characters may be read: bounded while they are kept."""
        return min(wanted, MAX_HELD_CHARS - self._num_held) if self._keeps() else wanted

    def keep(self, raw: str) -> None:
        if self._keeps():
            self._num_held += len(raw)
        if not self.is_started:
            self.raw.append(raw)

    def _keeps(self) -> bool:
        return not self.is_started or not (self.is_streamed or self.role == "other")

    def keep_value(self, passed: str) -> None:
        if self.role != "other":
            self.kept.append(passed)


def _text_of(value: str) -> str:
    """The text of a JSON string; an escaped lone surrogate, which is no text, becomes U+FFFD."""
    text: str = json.loads(value)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _arguments_of(value: str) -> str:
    """Arguments as JSON text: given as a string that holds it, or as nothing."""
    if value.startswith('"'):
        value = _text_of(value).strip()
    return value if value not in ("", "null") else "{}"


PARSERS: Final[dict[str, Callable[[Callable[[], str]], ToolCallParser]]] = {
    "hermes": ToolCallParser
}
