"""The chat templates that a process has compiled, and the sandbox in which they run: jinja2's.

The sandbox has what the templates published with models expect, and keeps a template from objects that it must not see.
It bounds neither time nor memory: octavo.text.template_process, in which alone it is used, has limits of both.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of jinja2 for chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)


class _GenerationTag(Extension):
    """Accepts {% generation %}, which marks for training what the assistant said. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class TemplateTable:
    """Compiles templates, each under a key, and renders those that it has."""

    def __init__(self) -> None:
        self._sandbox = TemplateSandbox()
        self._known: dict[int, tuple[Template, Mapping[str, str]]] = {}

    def answer(self, request: Mapping[str, Any]) -> str:
        """The text of the template that the request names; of one that is only compiled: "tools" if it takes any.

        Raises whatever a template can raise.
        """
        text = ""
        if "source" in request:
            text = self._compile(request["key"], request["source"], request["variables"])
        if "values" in request:
            template, variables = self._known[request["key"]]
            text = template.render(**request["values"], **variables)
        return text

    def _compile(self, key: int, source: str, variables: Mapping[str, str]) -> str:
        self._known[key] = self._sandbox.from_string(source), variables
        names = meta.find_undeclared_variables(self._sandbox.parse(source))
        return "tools" if "tools" in names else ""


def message_of(error: Exception) -> str:
    """What is wrong with a template, or with a chat for it."""
    return str(error.message if isinstance(error, TemplateError) and error.message else error)
