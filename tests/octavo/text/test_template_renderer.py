"""A template that runs for ever, fills the memory or breaks its process is refused, and nobody else notices."""

import os
import queue
import resource
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from effort import some
from hostile_templates import HOSTILE, NESTED

from octavo.request.errors import InvalidArgument, Unreachable
from octavo.text import template_renderer
from octavo.text.chat import ChatTemplate
from octavo.text.template_renderer import ModelTemplate, RendererPool, TemplateRenderer


@pytest.fixture
def pool():
    made = RendererPool()
    yield made
    made.close()


CHAT = [("user", "hi")]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LONGEST_ERROR = 1000  # characters
WAIT = """
import sys, time
from octavo.text.chat import ChatTemplate
from octavo.text.template_renderer import RENDERERS
ChatTemplate("{{ messages[0].content }}", {})
print(RENDERERS._idle[0]._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(template_renderer, "SECONDS", 0.1)


@pytest.mark.parametrize("name", some(HOSTILE, list(HOSTILE)[::5]))
def test_a_hostile_template_is_refused(name, hasty):
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArgument, match="template") as refused:
        ChatTemplate(HOSTILE[name], {}).render(CHAT, True)
    assert len(str(refused.value)) < LONGEST_ERROR
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 64 << 10, "KiB more than ever before"
    assert ChatTemplate(PLAIN, {}).render(CHAT, True) == "hi"


def test_a_hostile_template_does_not_hold_others_up(monkeypatch):
    """It runs until this test sends its process the signal by which the kernel ends it where it took too long."""
    hostile, honest = ChatTemplate(NESTED + "{{ n.a == n.b }}", {}), ChatTemplate(PLAIN, {})
    template_renderer.RENDERERS.close()
    monkeypatch.setattr(template_renderer, "SECONDS", 3600.0)
    begun: queue.SimpleQueue[TemplateRenderer] = queue.SimpleQueue()

    class Noted(TemplateRenderer):
        def __init__(self):
            super().__init__()
            begun.put(self)

    monkeypatch.setattr(template_renderer, "TemplateRenderer", Noted)
    with ThreadPoolExecutor(1) as aside:
        refused = aside.submit(hostile.render, CHAT, True)
        taken = begun.get(timeout=60)
        try:
            assert [honest.render([("user", str(i))], True) for i in range(20)] == [str(i) for i in range(20)]
            assert not refused.done()
        finally:
            os.kill(taken._process.pid, signal.SIGPROF)
        assert isinstance(refused.exception(), InvalidArgument)


def test_a_program_that_is_killed_leaves_no_process():
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        left = os.pidfd_open(int(program.stdout.readline()))
        program.kill()
        try:
            assert select.select([left], [], [], 60)[0], "it still runs"
        finally:
            os.close(left)


def test_a_process_that_somebody_ends_or_stops_is_replaced(pool):
    template = ModelTemplate("{{ messages }}", {})
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert pool.render(template, {"messages": "a"}) == "a"
        [renderer] = pool._idle
        os.kill(renderer._process.pid, number)
        renderer._process.wait()
        assert pool.render(template, {"messages": "b"}) == "b"
    [renderer] = pool._idle
    os.kill(renderer._process.pid, signal.SIGSTOP)
    renderer._socket.settimeout(0.1)
    with pytest.raises(Unreachable, match="silent"):
        pool.render(template, {"messages": "c"})
    assert pool.render(template, {"messages": "d"}) == "d"


@pytest.mark.parametrize("source", ["{% for a in b %}" * 60 + "{% endfor %}" * 60, "{{ " + "(" * 5000, "x" * (2 << 20)])
def test_a_template_that_python_cannot_compile_is_refused(source):
    with pytest.raises(InvalidArgument, match="does not compile"):
        ChatTemplate(source, {})
