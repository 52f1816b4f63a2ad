"""A session's view of who runs its sequence."""

from types import SimpleNamespace

import pytest

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import SequenceState
from router.streaming import owner_link as owner_link_module
from router.streaming.owner_link import MAX_UNKNOWN_S, OwnerLink

WORKER = Incarnation("w")


class FakePool:
    """A pool of one worker, which notes from which indexes on it was asked for items."""

    def __init__(self) -> None:
        self.followed: list[list[int]] = []
        self.stream = SimpleNamespace(connected=True, follow=lambda seq_id, indexes: self.followed.append(indexes))

    def find_link(self, incarnation):
        return SimpleNamespace(step_stream=self.stream) if incarnation == WORKER else None

    def has_lost(self, incarnation):
        return incarnation == "dead"


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def link(pool) -> OwnerLink:
    record = SimpleNamespace(seq_id=SequenceId("s"), owner=Incarnation(""), epoch=0, state=SequenceState.QUEUED)
    return OwnerLink(record, pool)


def test_an_assignment_streams_and_a_notice_does_not_until_the_owner_is_asked(link, pool):
    link.set_owner(WORKER, 1, is_streaming=True)
    assert link.is_streaming
    link.set_owner(WORKER, 2, is_streaming=False)
    assert not link.is_streaming
    link.follow_items([3])
    assert link.is_streaming
    assert pool.followed == [[3]]


def test_nothing_streams_from_an_owner_without_connection(link, pool):
    link.set_owner(WORKER, 1, is_streaming=True)
    pool.stream.connected = False
    assert not link.is_streaming
    link.follow_items([0])
    pool.stream.connected = True
    assert not link.is_streaming, "the owner of a new connection has not been asked"
    assert pool.followed == []


def test_a_lost_owner_is_known(link):
    link.set_owner(Incarnation("dead"), 1, is_streaming=False)
    assert link.is_lost
    assert link.worker_link is None


def test_an_owner_that_does_not_know_the_sequence_is_asked_ever_less_often_and_then_given_up(link, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(owner_link_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    link.set_owner(WORKER, 1, is_streaming=True)
    pauses = []
    while (pause := link.unknown_delay()) is not None:
        assert not link.is_streaming
        pauses.append(pause)
        clock[0] += pause
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05
    assert pauses[-1] <= MAX_UNKNOWN_S
    assert owner_link_module.UNKNOWN_FOR_S < sum(pauses) < owner_link_module.UNKNOWN_FOR_S + 2 * MAX_UNKNOWN_S


def test_a_new_epoch_begins_the_patience_anew(link, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(owner_link_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    link.set_owner(WORKER, 1, is_streaming=True)
    first = link.unknown_delay()
    clock[0] += 60.0
    link.set_owner(WORKER, 2, is_streaming=True)
    assert link.unknown_delay() == first
