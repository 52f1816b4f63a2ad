import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_views import idle_view

from octavo.request.ids import Incarnation, SequenceId
from router.fleet.kv_index import HitCounts
from router.fleet.worker_view import SequenceView, WorkerSnapshot
from router.placing.placement import FREE_SHARE
from router.placing.target_choice import choose_target, has_any_room, has_room

BLOCK_SIZE = 16
IDLE = idle_view("a", max_batch_sequences=16)
SEQUENCE = SequenceView(
    seq_id=SequenceId("s"), num_tokens=640, expected_tokens=500, num_blocks=40, num_own_blocks=40, num_branches=1
)


def worker(name, *, of_view=None, **changes):
    view = dataclasses.replace(IDLE, incarnation=Incarnation(name), worker_id=name, **(of_view or {}))  # type: ignore[arg-type]
    snapshot = WorkerSnapshot(view=view, model="m", layout="l")
    return dataclasses.replace(snapshot, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (worker("a", draining=True), "draining"),
        (worker("a", alive=False), "lease"),
        (worker("a", of_view={"num_running": 16}), "no room"),
        (worker("a", of_view={"num_free_blocks": 15}), "no room"),
        (worker("a", of_view={"context_tokens": 640}), "640"),
    ],
)
def test_says_why_a_worker_is_not_the_target(target, reason):
    hits = {target.view.incarnation: HitCounts(640)}
    decision = choose_target(SEQUENCE, BLOCK_SIZE, [target, worker("b")], hits)
    assert decision.worker is not None and decision.worker.worker_id == "b"
    assert [reason in candidate.reason for candidate in decision.candidates if not candidate.eligible] == [True]


@given(
    num_free=st.integers(0, 200),
    num_cached=st.integers(0, 200),
    num_running=st.integers(0, 18),
    num_blocks=st.integers(1, 100),
    num_branches=st.integers(1, 4),
    num_hit=st.integers(0, 120),
)
def test_room_is_never_promised_that_is_not_there(num_free, num_cached, num_running, num_blocks, num_branches, num_hit):
    view = dataclasses.replace(IDLE, num_free_blocks=num_free, num_cached_blocks=num_cached, num_running=num_running)
    sequence = dataclasses.replace(SEQUENCE, num_blocks=num_blocks, num_branches=num_branches)
    hit = HitCounts(num_hit * BLOCK_SIZE)
    if has_room(view, sequence, hit):
        assert num_running + num_branches <= view.max_batch_sequences
        assert max(0, num_blocks - num_hit) + num_branches + FREE_SHARE * 1000 <= num_free + num_cached
        assert has_any_room(view)
