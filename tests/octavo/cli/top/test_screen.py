"""A frame fits the terminal, says what the view says, and obeys nothing that a client has written."""

import io

import pytest
from cluster_views import sequence, view, worker
from rich.console import Console

from octavo.cli.top.cluster_figures import ClusterFigures
from octavo.cli.top.cluster_reader import ClusterReading
from octavo.cli.top.screen import frame_of, plain
from octavo.v1 import admin_pb2, inference_pb2


def frame(*views, width=80, height=24, trouble="", encoding="utf-8", age_s=0.0):
    figures = ClusterFigures()
    for each in views:
        figures.add(each)
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False, color_system=None)
    console.print(frame_of(ClusterReading(views[-1], "e", trouble, age_s), figures, console, height))
    out.flush()
    return out.buffer.getvalue().decode(encoding).splitlines()


def test_everything_is_said():
    lines = frame(view(1), view(2))
    text = "\n".join(lines)
    assert lines[0] == "octavo top  router-0  up 2 s  live"
    assert " ".join(lines[1].split()) == "200 tokens/s 8 running 0 moving 3 waiting 9 streams here"
    assert lines[2] == "TTFT 55 ms (95 %: 96 ms)   ITL 55 ms (95 %: 96 ms)   prefix hits 25 %"
    assert " ".join(lines[5].split()) == "worker-0 available 5 1 ████▒▒·· 50 % 12ms 10/90/0 300 25 %"
    assert "QUEUE acme 3 (900 tokens)" in lines
    assert any(" ".join(line.split()) == "request-0 worker-1 worker-0 with its blocks 3 s" for line in lines)
    assert any(line.split() == ["request-3", "acme", "running", "worker-0", "40", "120", "7", "s"] for line in lines)
    assert "more" not in text


def test_lost_routers_and_stores_are_told():
    assert frame(view(1), trouble="it is gone", age_s=12.3)[0].endswith("LOST 12 s ago, trying again: it is gone")
    last = view(2)
    last.ClearField("queue")
    last.failure.CopyFrom(admin_pb2.WatchClusterResponse(failure={"message": "it is away"}).failure)
    lines = frame(last)
    assert lines[0].endswith("NO STORE: it is away")
    assert "QUEUE not known: the store does not answer" in lines


def test_nothing_of_a_client_is_obeyed():
    """Names may have control characters, directions of writing and what looks like markup."""
    last = view(2, num_sequences=0, num_moves=0)
    last.sequences.append(sequence(0, request_id="\x1b[2Jx\u202e[red]", tenant="a\nb"))
    last.queue.tenants[0].tenant = "\x07[bold]"
    text = "\n".join(frame(last, width=120))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[bold]" in text
    assert "x\N{REPLACEMENT CHARACTER}[red]" in text
    assert plain("größe 日本") == "größe 日本"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("height", [12, 24, 60])
@pytest.mark.parametrize("count", [0, 1, 7, 150])
def test_a_frame_fits_the_terminal(width, height, count):
    views = [view(n, num_workers=count, num_sequences=count, num_moves=min(50, count)) for n in (1, 2)]
    lines = frame(*views, width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_states_of_workers_and_sequences():
    last = view(2, num_workers=0, num_sequences=0)
    lost = worker(2, reason="lost")
    lost.available = False
    drains = worker(1)
    drains.load.draining = True
    silent = worker(3, reason="silent for 3 s")
    silent.available = False
    last.workers.extend([worker(0), drains, lost, silent])
    last.sequences.append(sequence(0, moving_to="i1"))
    waiting = sequence(1)
    waiting.state, waiting.owner = inference_pb2.REQUEST_STATE_QUEUED, ""
    last.sequences.append(waiting)
    lines = frame(view(1), last)
    states = [line.split()[1] for line in lines if line.startswith("worker-")]
    assert states == ["available", "draining", "lost", "unavailable"]
    assert any("moving" in line and "worker-0 > worker-1" in line for line in lines)
    assert any("waiting" in line and "request-1" in line for line in lines)
