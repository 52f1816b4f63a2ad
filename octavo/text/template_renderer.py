"""Has chat templates rendered in processes of their own, so that no template can take the time or memory of this one.

    RENDERERS.takes_tools(template)              # compiles it; raises TemplateFault
    RENDERERS.render(template, values)

A template comes with a model's files and has whatever loops and comparisons it likes.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.process.helper_process import HelperLimits, HelperPool, HelperProcess, HelperRefusal, TooCostly, tend
from octavo.text import template_process

# What one use of a template may cost, and so much more for each byte of the request.
SECONDS, SECONDS_PER_BYTE = 2.0, 1e-6
MEMORY, MEMORY_PER_BYTE = 64 << 20, 32
TEXT, TEXT_PER_BYTE, MOST_TEXT = 1 << 20, 8, 16 << 20
PATIENCE_S = 30.0
MAX_TEMPLATES = 32  # that one process compiles

_SCRIPT = Path(template_process.__file__)
_keys = itertools.count()


class TemplateFault(Exception):
    """The template does not compile, refuses the chat, or takes too much. The message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelTemplate:
    """A template, and the values that it expects beside those of a chat."""

    source: str
    variables: Mapping[str, str]
    key: int = field(default_factory=lambda: next(_keys))


class TemplateRenderer(HelperProcess):
    """A process in which templates run. One thread may use it at a time."""

    def __init__(self) -> None:
        """Raises OSError."""
        super().__init__(_SCRIPT, PATIENCE_S)
        self._known: set[int] = set()

    def ask(self, template: ModelTemplate, values: Mapping[str, Any] | None) -> str:
        """The text of the template with these values. Raises TemplateFault, HelperEnded or TimeoutError."""
        request: dict[str, Any] = {"key": template.key}
        if template.key not in self._known:
            request |= {"source": template.source, "variables": template.variables}
        if values is not None:
            request["values"] = values
        body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        limits = HelperLimits(
            SECONDS + SECONDS_PER_BYTE * len(body),
            MEMORY + MEMORY_PER_BYTE * len(body),
            min(TEXT + TEXT_PER_BYTE * len(body), MOST_TEXT),
        )
        try:
            text = self.ask_bytes(body, limits).decode("utf-8", "surrogatepass")
        except TooCostly as error:
            self._note_known(template)
            raise TemplateFault(f"{error} for such a chat") from None
        except HelperRefusal as error:
            raise TemplateFault(str(error)) from None
        self._note_known(template)
        return text

    def _note_known(self, template: ModelTemplate) -> None:
        self._known.add(template.key)
        self.is_fit = self.is_fit and len(self._known) < MAX_TEMPLATES


class RendererPool(HelperPool[TemplateRenderer]):
    """The renderers of a program. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(lambda: TemplateRenderer(), "chat templates")

    def takes_tools(self, template: ModelTemplate) -> bool:
        """Compiles the template, and says whether it has a place for tools. Raises TemplateFault or Unreachable."""
        return bool(self.use(lambda renderer: renderer.ask(template, None)))

    def render(self, template: ModelTemplate, values: Mapping[str, Any]) -> str:
        """The text of the template with these values. Raises TemplateFault or Unreachable."""
        return self.use(lambda renderer: renderer.ask(template, values))


RENDERERS = RendererPool()
tend(RENDERERS)
