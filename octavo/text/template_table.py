"""The chat templates that a process has compiled, by their keys. Only octavo.text.template_process uses it."""

from collections.abc import Mapping
from typing import Any

from jinja2 import Template, TemplateError, meta

from octavo.text.template_sandbox import TemplateSandbox


class TemplateTable:
    """Compiles templates, and renders those that it has."""

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
