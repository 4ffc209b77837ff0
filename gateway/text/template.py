"""Chat templates of model files: compiled once, sandboxed, bounded in loops, memory and output.

The environment is the one that Hugging Face templates are written for: trim_blocks, lstrip_blocks,
loop controls, `generation` blocks, raise_exception, strftime_now, a tojson that leaves HTML alone.
A model file is not trusted: attribute access is sandboxed, every loop step and assignment counts
against a budget, and operations that build huge values from small ones are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text.errors import TextError
from gateway.text.guard import MARK

MAX_SOURCE_CHARS = 1 << 20
MAX_CHARS = 16 << 20  # of the output, and of any text a template makes on the way
MAX_STEPS = 250_000  # of all loops of one rendering together, and items of any list
MAX_INDENT = 16
SEARCH_METHODS = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find"}
PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs"}
WIDE = re.compile(r"\d{4}|\*|\{[^}]*\{")  # a width of thousands, or one given as an argument


class ChatTemplate:
    """Renders messages to a prompt that ends where the assistant begins to speak.

    `fault` says why the template cannot be used, None when it can. `searched` holds the constants
    that the template looks for inside messages (`'</think>' in content`).
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.fault: str | None = None
        self.searched: frozenset[str] = frozenset()
        self.names_developer = "developer" in source
        self._environment = _Environment(clock)
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._always = {name: text for name, text in tokens.items() if text is not None}
        try:
            if MARK in source or len(source) > MAX_SOURCE_CHARS:
                raise jinja2.TemplateError("it is too long or holds U+FDD0")
            tree = self._environment.parse(source)
            self.searched = frozenset(_searched(tree))
            _put_on_budget(tree)
            code = self._environment.compile(tree, "chat_template", "chat_template")
            # A plain dict: jinja's ChainMap is copied for each rendering, in Python, for 6 µs.
            known = dict(self._environment.make_globals(None))
            self._template = jinja2.Template.from_code(self._environment, code, known)
        except Exception as error:  # the compiler meets programs that nobody has checked
            self.fault = str(error)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. Raises TextError when the template fails or refuses."""
        if self.fault is not None:
            raise _failed(f"a template that does not compile ({self.fault})")
        self._environment.start()
        context = self._template.new_context(
            self._always
            | {
                "messages": messages,
                "tools": tools or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.root_render_func(context):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise SecurityError(f"its output is longer than {MAX_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # a template is a program: it may raise anything
            raise _failed(f"{type(error).__name__}: {error}".replace(MARK, "")) from error
        return "".join(pieces)


def _failed(found: str) -> TextError:
    return TextError(
        "messages",
        found=found,
        allowed="what the model's chat template accepts",
        remedy="change the messages, or use /v1/completions",
    )


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
        )
        self._steps_left = 0
        for name in ("center", "format", "indent"):  # their width turns into memory
            self.filters.pop(name)
        self.filters["tojson"] = _to_json
        self.filters["step"] = self._step
        self.filters["bounded"] = _bounded
        self.globals.pop("lipsum")
        self.globals["range"] = self._range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: clock().strftime(form)

    def start(self) -> None:
        """Gives the rendering that now begins its whole budget; it runs without interruption."""
        self._steps_left = MAX_STEPS

    @jinja2.pass_context  # or the compiler would fold the call away
    def _step(self, _context: object, _value: object) -> None:
        self._spend(1)

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._spend(len(numbers))
        return numbers

    def _spend(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise SecurityError(f"its loops take more than {MAX_STEPS} steps")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("operator ** is not allowed")
        if operator == "%" and isinstance(left, str) and WIDE.search(left):
            raise SecurityError("a format with a width is not allowed")
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            text, times = (left, right) if isinstance(right, int) else (right, left)
            if not isinstance(times, int) or len(text) * times > _max_length(text):
                raise SecurityError("operator * makes a value that is too long")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is not None and WIDE.search(value.__self__):
            raise SecurityError("a format with a width is not allowed")
        return formatter


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model said; it renders as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _put_on_budget(tree: nodes.Template) -> None:
    """Counts each pass through a loop or macro and bounds each assigned value."""
    blocks: list[nodes.For | nodes.Macro] = []
    blocks += tree.find_all(nodes.For)
    blocks += tree.find_all(nodes.Macro)
    for block in blocks:
        block.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(None), "step", tree), lineno=1))
    for assignment in list(tree.find_all(nodes.Assign)):
        assignment.node = _filter(assignment.node, "bounded", tree)


def _filter(node: nodes.Node, name: str, tree: nodes.Template) -> nodes.Filter:
    return nodes.Filter(
        cast(nodes.Expr, node),
        name,
        [],
        [],
        None,
        None,
        lineno=tree.lineno,
        environment=tree.environment,
    )


def _searched(tree: nodes.Template) -> Iterator[str]:
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCH_METHODS:
            yield from _constants(call.args)
    for comparison in tree.find_all(nodes.Compare):
        if comparison.ops[0].op in ("in", "notin"):
            yield from _constants([comparison.expr])


def _constants(expressions: Iterable[nodes.Expr]) -> Iterator[str]:
    for expression in expressions:
        if isinstance(expression, nodes.Const) and isinstance(expression.value, str):
            yield expression.value


def _bounded(value: object) -> object:
    if isinstance(value, str | list | tuple | dict) and len(value) > _max_length(value):
        raise SecurityError(f"a value is longer than {_max_length(value)}")
    return value


def _max_length(value: object) -> int:
    return MAX_CHARS if isinstance(value, str) else MAX_STEPS


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1 << 64


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Compatible with the tojson of Hugging Face templates: `<` stays `<`, and a mark a mark."""
    if indent is not None and indent > MAX_INDENT:
        raise SecurityError(f"tojson takes an indent of at most {MAX_INDENT}")
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return text.replace(json.dumps(MARK)[1:-1], MARK) if ensure_ascii else text
