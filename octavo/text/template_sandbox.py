"""The sandbox in which chat templates run: jinja2's, with a bound on the steps of a template and on the texts it makes.

jinja2's sandbox keeps a template from objects it must not see, but lets it run for ever and fill the memory. A template
comes with a model's files, so here each pass of a loop and each call is a step, and every text is paid for before it is
made (octavo.text.template_budget). What makes texts of a size that arguments say, is bounded or not there.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.text.template_budget import TemplateTooCostly, expect_room, length_of, size_of, spend

MAX_SOURCE = 1 << 20  # characters of a template
MAX_WIDTH = 1000  # of a field that is filled up with spaces
MAX_NUMBER_BITS = 4096

# What a template may not have: its size is not bounded by that of its arguments, and no chat needs it.
MISSING_FILTERS = ("center", "pprint", "sum", "urlize", "wordwrap", "xmlattr")
MISSING_METHODS = ("translate", "expandtabs", "to_bytes", "from_bytes")
WIDTHS = ("ljust", "rjust", "center", "zfill", "indent", "tojson", "batch", "slice", "round")
_WIDE_FORMAT = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*(?:\d{4}|\*)|\{[^{}]*:[^{}]*(?:\d{4}|\{)")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment of jinja2 in which every step and every text of a template is paid for."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_pay_for_output)
        del self.globals["lipsum"]
        self.filters = {name: _paid(name, each) for name, each in self.filters.items() if name not in MISSING_FILTERS}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Makes `function` a filter that is paid for."""
        self.filters[name] = _paid(name, function)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        spend()
        if __obj == __self.begin_pass:
            return ""
        _check_call(__obj, [*args, *kwargs.values()])
        return _paid_result(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return _paid_result(super().call_binop(context, operator, left, right))

    def begin_pass(self) -> str:
        """Each pass of a loop begins with a call of this, which `call` counts as a step."""
        return ""

    def concatenate(self, *parts: Any) -> str:
        """What the operator ~ makes."""
        expect_room(sum(map(size_of, parts)))
        return "".join(map(str, parts))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateTooCostly(f"it has more than {MAX_SOURCE} characters")
        parsed: nodes.Template = _PaidSteps().visit(super()._parse(source, name, filename))
        return parsed


class _PaidSteps(NodeTransformer):
    """Has the passes of loops counted, and the operands of ~ joined by the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_called("begin_pass", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _called("concatenate", list(node.nodes), node.lineno)


def _called(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), arguments, [], None, None, lineno=line)


def _pay_for_output(value: Any) -> Any:
    spend(size_of(value))
    return value


def _paid_result(value: Any) -> Any:
    size = 0 if isinstance(value, Mapping) else length_of(value)
    expect_room(size)
    spend(size)
    return value


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, whose arguments are checked and whose work and result are paid for."""

    @wraps(function)  # jinja2 has marked it if it wants the environment or the context first
    def paid(*args: Any, **named: Any) -> Any:
        values = [value for value in (*args, *named.values()) if not isinstance(value, Context)]
        spend(sum(map(length_of, values)))
        _check_sizes(name, [value for value in values if isinstance(value, str | bytes | int | Sequence | Mapping)])
        return _paid_result(function(*args, **named))

    return paid


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises TemplateTooCostly if the result would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        factor = {"**": max(right, 0), "*": 1}.get(operator, 0)
        if (left.bit_length() + right.bit_length()) * factor > MAX_NUMBER_BITS:
            raise TemplateTooCostly("it makes too large a number")
    elif operator == "*":
        for text, times in ((left, right), (right, left)):
            expect_room(length_of(text) * times if isinstance(times, int) else 0)
    elif operator == "+":
        expect_room(length_of(left) + length_of(right))
    elif operator == "%" and isinstance(left, str | bytes):
        _check_format(left, right)


def _check_call(function: Any, values: Sequence[Any]) -> None:
    """Raises TemplateTooCostly for a method whose result would be too large, or is not for templates."""
    name = getattr(function, "__name__", "")
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    if name in MISSING_METHODS and isinstance(owner, str | bytes | int):
        raise TemplateTooCostly(f"{name} is not for templates")
    if isinstance(owner, str | bytes):
        _check_sizes(name, [values[0], owner] if name == "join" and values else [owner, *values])


def _check_sizes(name: str, values: Sequence[Any]) -> None:
    """Raises TemplateTooCostly for a filter or a method of texts whose result would be too large.

    `values` begins with the text; for join, with the parts of it.
    """
    if name in WIDTHS:
        widths = [value for value in values if type(value) is int]
        if any(abs(width) > MAX_WIDTH for width in widths[-2:]):
            raise TemplateTooCostly(f"a width is above {MAX_WIDTH}")
        expect_room(sum(map(size_of, values)) * (1 + max([0, *widths]) if name in ("indent", "tojson") else 1))
    elif name in ("format", "format_map") and values:
        _check_format(values[0], values[1:])
    elif name == "join" and values:
        expect_room(size_of(values[0]) + length_of(values[0]) * sum(map(length_of, values[1:])))
    elif name == "replace" and len(values) > 2 and isinstance(values[0], type(values[1])):
        expect_room(len(values[0]) + values[0].count(values[1]) * length_of(values[2]))
    elif name in ("string", "urlencode"):
        expect_room(3 * sum(map(size_of, values)))


def _check_format(layout: Any, values: Any) -> None:
    text = layout.decode("latin-1") if isinstance(layout, bytes) else str(layout)
    if _WIDE_FORMAT.search(text):
        raise TemplateTooCostly(f"a format has a width above {MAX_WIDTH}, or one that is an argument")
    expect_room(len(text) + (text.count("{") + text.count("%")) * size_of(values))
