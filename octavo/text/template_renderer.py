"""Has chat templates rendered in processes of their own, so that no template can take the time or memory of this one.

    RENDERERS.takes_tools(template)              # compiles it; raises TemplateFault
    RENDERERS.render(template, values)

A template comes with a model's files and has whatever loops and comparisons it likes. Where it goes over a limit, its
process ends, and the next template has another one.
"""

import atexit
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.request.errors import Unreachable
from octavo.text import template_process
from octavo.text.template_process import ANSWER, HEAD

# What one use of a template may cost, and so much more for each byte of the request.
SECONDS, SECONDS_PER_BYTE = 2.0, 1e-6  # of a processor: no template is too costly because a machine is busy
MEMORY, MEMORY_PER_BYTE = 64 << 20, 32
TEXT, TEXT_PER_BYTE, MOST_TEXT = 1 << 20, 8, 16 << 20
PATIENCE_S = 30.0  # with a process that neither answers nor runs, such as one that was stopped
MAX_TEMPLATES = 32  # that one process compiles
MAX_IDLE = 2  # processes that wait for work
TRIES = 3  # a process that waited may have been ended by somebody else
MIB = 1 << 20

_SCRIPT = Path(template_process.__file__)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_keys = itertools.count()


class TemplateFault(Exception):
    """The template does not compile, or refuses the chat. The message says why."""


class TemplateTooCostly(TemplateFault):
    """The template takes too much time or memory, or makes too long a text."""


class RendererEnded(Exception):
    """The process has ended, and the template is not the cause."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelTemplate:
    """A template, and the values that it expects beside those of a chat."""

    source: str
    variables: Mapping[str, str]
    key: int = field(default_factory=lambda: next(_keys))


class TemplateRenderer:
    """A process in which templates run. One thread may use it at a time."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.is_fit = False  # whether it can be asked again, as its last answer said
        self._known: set[int] = set()
        self._greeting = json.dumps([*sys.path, str(_SCRIPT.parents[2])]).encode() + b"\n"
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", str(_SCRIPT)]
        try:
            self._process = subprocess.Popen(  # in a session of its own, as Ctrl-C is not for it
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._socket.settimeout(PATIENCE_S)

    def ask(self, template: ModelTemplate, values: Mapping[str, Any] | None) -> str:
        """The text of the template with these values. Raises TemplateFault, RendererEnded or TimeoutError."""
        self.is_fit = False
        request: dict[str, Any] = {"key": template.key}
        if template.key not in self._known:
            request |= {"source": template.source, "variables": template.variables}
        if values is not None:
            request["values"] = values
        body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        memory = MEMORY + MEMORY_PER_BYTE * len(body)
        max_text = min(TEXT + TEXT_PER_BYTE * len(body), MOST_TEXT)
        seconds = SECONDS + SECONDS_PER_BYTE * len(body)
        try:
            self._socket.sendall(self._greeting + HEAD.pack(len(body), memory, max_text, seconds) + body)
            kind, is_fit, length = ANSWER.unpack(self._receive(ANSWER.size))
            text = self._receive(length).decode("utf-8", "surrogatepass")
        except ConnectionError:
            self.close()
            status = self._process.returncode
            if status == -signal.SIGPROF:
                raise TemplateTooCostly(f"it takes more than {seconds:.1f} s of a processor for such a chat") from None
            if status == template_process.OUT_OF_MEMORY:
                raise TemplateTooCostly(f"it needs more than {memory // MIB} MiB for such a chat") from None
            if -status in _CRASHES:
                raise TemplateTooCostly("it broke the process that it ran in") from None
            raise RendererEnded(f"it ended with status {status}") from None
        self._greeting = b""
        if kind != template_process.TEMPLATE_ERROR:
            self._known.add(template.key)
        self.is_fit = is_fit and len(self._known) < MAX_TEMPLATES
        if kind == template_process.TOO_LONG:
            raise TemplateTooCostly(f"it makes a text of more than {max_text / MIB:.1f} MiB of such a chat")
        if kind == template_process.TEMPLATE_ERROR:
            raise TemplateFault(text)
        return text

    def close(self) -> None:
        """Ends the process, unless it has ended. Its answers are lost."""
        self._socket.close()
        try:
            self._process.wait(1.0)  # it ends by itself when nobody asks any more
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Leaves the process to another one, from which this one was forked."""
        self._socket.close()
        self._process.returncode = 0  # so that nobody here waits for it

    def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            part = self._socket.recv(min(size - len(received), MIB))
            if not part:
                raise ConnectionResetError
            received += part
        return bytes(received)


class RendererPool:
    """The renderers of a program: as many as threads have templates rendered at one time. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[TemplateRenderer] = []
        self._lock = threading.Lock()

    def takes_tools(self, template: ModelTemplate) -> bool:
        """Compiles the template, and says whether it has a place for tools. Raises TemplateFault or Unreachable."""
        return bool(self._ask(template, None))

    def render(self, template: ModelTemplate, values: Mapping[str, Any]) -> str:
        """The text of the template with these values. Raises TemplateFault or Unreachable."""
        return self._ask(template, values)

    def close(self) -> None:
        """Ends the renderers that wait for work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for renderer in idle:
            renderer.close()

    def forget(self) -> None:
        """Leaves the renderers to the process that this one was forked from."""
        idle, self._idle, self._lock = self._idle, [], threading.Lock()
        for renderer in idle:
            renderer.forget()

    def _ask(self, template: ModelTemplate, values: Mapping[str, Any] | None) -> str:
        why: Exception | None = None
        for _ in range(TRIES):
            try:
                with self._lock:
                    idle = self._idle.pop() if self._idle else None
                return self._ask_one(idle or TemplateRenderer(), template, values)
            except TimeoutError:
                raise Unreachable(
                    f"the process of chat templates has been silent for {PATIENCE_S:g} s: retry"
                ) from None
            except (RendererEnded, OSError) as error:
                why = error
        raise Unreachable(f"the process of chat templates cannot be used: {why}: retry", retry_after_ms=1000) from why

    def _ask_one(self, renderer: TemplateRenderer, template: ModelTemplate, values: Mapping[str, Any] | None) -> str:
        try:
            return renderer.ask(template, values)
        finally:
            with self._lock:
                kept = renderer.is_fit and len(self._idle) < MAX_IDLE
                if kept:
                    self._idle.append(renderer)
            if not kept:
                renderer.close()


RENDERERS = RendererPool()
atexit.register(RENDERERS.close)
os.register_at_fork(after_in_child=RENDERERS.forget)
