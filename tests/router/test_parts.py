"""The small parts: pacing of replays, the session registry, resume places, who runs a suspect."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import HistoryLost, InvalidArgument
from octavo.ids import Incarnation, SequenceId
from router.fleet.replay_pace import REPLAY_SHARE, ReplayPace
from router.fleet.worker_view import WorkerView
from router.placing.assigner import quietest
from router.placing.placement import place
from router.session_registry import Assignment, SessionRegistry
from router.streaming.resume_tokens import StreamPlace, StreamStart


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.floats(10, 1e5), st.integers(1, 4096))
def test_replays_take_a_quarter_of_a_busy_worker(sizes, speed, burst):
    """All of them at once: when the last one goes, the others have had their time."""
    pace, begins = ReplayPace(), []
    for size in sizes:
        begins.append(pace.delay_s(1000.0, size, idle=False, tokens_per_s=speed, burst_tokens=burst))
    assert begins == sorted(begins)
    for number, delay in enumerate(begins):
        sent = sum(sizes[:number])
        assert sent <= burst + delay * speed * REPLAY_SHARE * (1 + 1e-9) + 1e-6


def test_an_idle_worker_replays_everything_at_once():
    pace = ReplayPace()
    assert pace.delay_s(0.0, 100, idle=True, tokens_per_s=1.0, burst_tokens=1) == 0
    assert pace.delay_s(1.0, 10_000, idle=False, tokens_per_s=1.0, burst_tokens=1) == 0
    assert ReplayPace().delay_s(1000.0, 9999, idle=False, tokens_per_s=0.0, burst_tokens=1) == 0


def test_a_place_beyond_the_journal_is_lost_history():
    assert StreamPlace(3).within(3) == 3
    with pytest.raises(HistoryLost):
        StreamPlace(4).within(3)
    with pytest.raises(InvalidArgument):
        StreamStart([StreamPlace(0), StreamPlace(0)]).check(1)
    assert StreamStart().place(7) == StreamPlace(0)


@dataclass(eq=False)
class Ear:
    seq_id: SequenceId
    owner: Incarnation = Incarnation("w")
    heard: list = field(default_factory=list)
    broken: bool = False

    def deliver(self, item):
        self.heard.append(item)

    def check(self):
        if self.broken:
            raise ValueError("a defect")
        self.heard.append("check")

    def placed(self, placed):
        self.heard.append(placed)


def test_the_registry_tells_those_concerned_and_one_defect_is_not_another_s(caplog):
    sessions, a = SessionRegistry(), SequenceId("a")
    ears = [Ear(a, broken=True), Ear(a), Ear(SequenceId("b"), Incarnation("v"))]
    for ear in ears:
        sessions.add(ear)
    assert sessions.deliver(a, 1)
    assert not sessions.deliver(SequenceId("c"), 1)
    sessions.check([a])
    sessions.check_owned(Incarnation("v"))
    sessions.placed(a, Assignment(1, Incarnation("w")))
    assert [len(ear.heard) for ear in ears] == [2, 3, 1]
    assert not sessions.remove(ears[0])
    assert sessions.remove(ears[1])
    assert a not in sessions
    assert len(sessions) == 1


def view(name: str, num_running: int, cached: int) -> WorkerView:
    return WorkerView(
        incarnation=Incarnation(name),
        worker_id=name,
        available=True,
        reason_unavailable="",
        queued_tokens=0,
        num_running=num_running,
        num_waiting=0,
        dispatched_tokens=0,
        num_dispatched=0,
        num_free_blocks=1000,
        num_cached_blocks=cached,
        num_blocks=2000,
        block_size=16,
        max_batch_sequences=64,
        context_tokens=8192,
    )


def test_a_suspect_goes_where_it_disturbs_the_fewest():
    """Whatever that place has cached."""
    busy, quiet = view("busy", 5, 0), view("quiet", 1, 0)
    decision = place(4000, {Incarnation("busy"): (3968, 0)}, [busy, quiet])
    assert decision.worker is busy
    assert quietest(decision) is quiet
    assert quietest(place(9000, {}, [busy])) is None
