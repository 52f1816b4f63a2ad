"""The order that a device is told: what other threads copy comes after the steps that were run."""

from contextlib import contextmanager

import pytest
import torch

from gpu_worker.running.memory.arena import StepMark

GPU = torch.device("cuda", 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU is told, in order."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == GPU

        def wait_event(self, event: Event) -> None:
            assert isinstance(event, Event)
            calls.append("wait for the event")

        def synchronize(self) -> None:
            calls.append("wait for the stream")

    @contextmanager
    def current(what: object):
        calls.append(f"enter {'device' if what == GPU else type(what).__name__}")
        yield
        calls.append("leave")

    for name, value in {"Event": Event, "Stream": Stream, "device": current, "stream": current}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls


def test_copies_wait_for_what_was_queued_before_the_last_note(told: list[str]) -> None:
    mark = StepMark(GPU)
    assert told == ["enter device", "record", "leave"], "the making of the memory counts as a step"
    told.clear()
    mark.note_steps()
    with mark.after_steps():
        told.append("copy")
    mark.wait_for_copies()
    assert told == [
        *("record", "enter device", "enter Stream", "wait for the event", "copy", "leave", "leave"),
        "wait for the stream",
    ]


def test_on_a_cpu_nothing_waits(told: list[str]) -> None:
    mark = StepMark(torch.device("cpu"))
    mark.note_steps()
    with mark.after_steps():
        pass
    mark.wait_for_copies()
    assert not told
