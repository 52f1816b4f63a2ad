"""A template that runs for ever, fills the memory or breaks its process is refused, and nobody else notices."""

import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_templates import HOSTILE, LARGE, NESTED

from octavo.request.errors import InvalidArgument, Unreachable
from octavo.text import template_renderer
from octavo.text.chat import ChatTemplate
from octavo.text.template_renderer import ModelTemplate, RendererPool

SUPPORT = Path(__file__).parents[2] / "support"
CHAT = [("user", "hi")]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LONGEST_ERROR = 1000  # characters
FILL_MEMORY = """
import resource, sys
from hostile_templates import HOSTILE, LARGE
from octavo.request.errors import InvalidArgument
from octavo.text import template_renderer
from octavo.text.chat import ChatTemplate
for name in LARGE:
    try:
        ChatTemplate(HOSTILE[name], {}).render([("user", "hi")], True)
    except InvalidArgument as error:
        print(name, error)
template_renderer.RENDERERS.close()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
"""
# Prints the process of its renderer, and what each side of a fork renders.
FORK = """
import os, sys
from octavo.text.chat import ChatTemplate
from octavo.text.template_renderer import RENDERERS
template = ChatTemplate("{{ messages[0].content }}", {})
for side in range(2):
    if side:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            sys.stdout.flush()
    print(side and not child, template.render([("user", "hi")], True), RENDERERS._idle[0]._process.pid, flush=True)
"""
WAIT = """
import sys, time
from octavo.text.chat import ChatTemplate
from octavo.text.template_renderer import RENDERERS
ChatTemplate("{{ messages[0].content }}", {})
print(RENDERERS._idle[0]._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "SECONDS", 0.1)


@pytest.fixture
def pool() -> Iterator[RendererPool]:
    made = RendererPool()
    yield made
    made.close()


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_refused(source: str, hasty: None) -> None:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArgument, match="template") as refused:
        ChatTemplate(source, {}).render(CHAT, True)
    assert len(str(refused.value)) < LONGEST_ERROR
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 64 << 10, "KiB more than ever before"
    assert ChatTemplate(PLAIN, {}).render(CHAT, True) == "hi"


def run(script: str) -> list[str]:
    """The lines that a script prints, in a small process."""
    command = [sys.executable, "-c", f"import sys\nsys.path.append({str(SUPPORT)!r})\n{script}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
def test_no_hostile_template_takes_much_memory() -> None:
    """In a small process: what the kernel counts for a child begins with what its parent had."""
    *refused, most = run(FILL_MEMORY)
    assert len(refused) == len(LARGE)
    assert int(most) < 64 + 64, "MiB"


def test_a_hostile_template_does_not_hold_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile, honest = ChatTemplate(NESTED + "{{ n.a == n.b }}", {}), ChatTemplate(PLAIN, {})
    monkeypatch.setattr(template_renderer, "SECONDS", 3.0)
    with ThreadPoolExecutor(1) as aside:
        refused = aside.submit(hostile.render, CHAT, True)
        assert [honest.render([("user", str(i))], True) for i in range(20)] == [str(i) for i in range(20)]
        assert not refused.done()
        assert isinstance(refused.exception(), InvalidArgument)


def test_threads_render_beside_each_other(pool: RendererPool) -> None:
    template = ModelTemplate("{{ messages * times }}", {})
    with ThreadPoolExecutor(8) as threads:
        asked = [{"messages": f"<{i}>", "times": i * 1000} for i in range(64)]
        assert list(threads.map(lambda values: pool.render(template, values), asked)) == [
            f"<{i}>" * i * 1000 for i in range(64)
        ]


def test_a_process_that_somebody_ends_is_replaced(pool: RendererPool) -> None:
    template = ModelTemplate("{{ messages }}", {})
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert pool.render(template, {"messages": "a"}) == "a"
        [renderer] = pool._idle
        os.kill(renderer._process.pid, number)
        renderer._process.wait()
        assert pool.render(template, {"messages": "b"}) == "b"


def test_a_process_that_is_stopped_is_replaced(pool: RendererPool, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ModelTemplate("{{ messages }}", {})
    assert pool.render(template, {"messages": "a"}) == "a"
    [renderer] = pool._idle
    os.kill(renderer._process.pid, signal.SIGSTOP)
    renderer._socket.settimeout(0.1)
    with pytest.raises(Unreachable):
        pool.render(template, {"messages": "b"})
    assert pool.render(template, {"messages": "b"}) == "b"


def test_where_no_process_can_be_started_a_retry_helps(pool: RendererPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/no/such/program")
        with pytest.raises(Unreachable, match="retry"):
            pool.render(ModelTemplate("{{ messages }}", {}), {"messages": "a"})
    assert pool.render(ModelTemplate("{{ messages }}", {}), {"messages": "a"}) == "a"


def test_what_a_template_leaves_behind_is_nobody_elses(pool: RendererPool) -> None:
    """Memory that one template has not given back is not missing for the next one."""
    for _ in range(3):
        assert pool.render(ModelTemplate("{{ ('a' * 50000000) | length }}", {}), {}) == "50000000"
    many = [ModelTemplate("{{ " + str(i) + " }}", {}) for i in range(2 * template_renderer.MAX_TEMPLATES)]
    for _ in range(2):
        assert [pool.render(each, {}) for each in many] == [str(i) for i in range(len(many))]


@pytest.mark.parametrize("text", ["\ud83d", "\0", "\U0001f600" * 9, "{{ 1 }}", "\r\n\u2028"])
def test_every_text_comes_back_as_it_was(text: str) -> None:
    assert ChatTemplate("{{ messages[0].content }}", {}).render([("user", text)], True) == text


def test_a_long_chat_may_cost_more() -> None:
    chat = [("user", "a b \U0001f600 " * 20_000)] * 10
    source = "{% for m in messages %}{% for part in m.content.split(' ') %}{{ part ~ '-' }}{% endfor %}{% endfor %}"
    assert len(ChatTemplate(source, {}).render(chat, True)) == 10 * (20_000 * 6 + 1)


@pytest.mark.parametrize("source", ["{% for a in b %}" * 60 + "{% endfor %}" * 60, "{{ " + "(" * 5000, "x" * (2 << 20)])
def test_a_template_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(InvalidArgument, match="does not compile"):
        ChatTemplate(source, {})


def test_each_side_of_a_fork_has_processes_of_its_own() -> None:
    before, child, parent = (line.split() for line in run(FORK))
    assert [child[:2], parent[:2]] == [["True", "hi"], ["False", "hi"]]
    assert before[2] == parent[2] != child[2]


def test_a_program_that_is_killed_leaves_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        left = os.pidfd_open(int(program.stdout.readline()))
        program.kill()
        try:
            assert select.select([left], [], [], 60)[0], "it still runs"
        finally:
            os.close(left)
