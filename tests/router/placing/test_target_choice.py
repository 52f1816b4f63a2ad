import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_views import idle_view

from octavo.request.ids import Incarnation, SequenceId
from router.fleet.worker_snapshot import SequenceView, WorkerSnapshot
from router.placing.placement import FREE_SHARE
from router.placing.target_choice import choose_target, has_any_room, has_room

BLOCK_SIZE = 16
IDLE = idle_view("a", max_batch_sequences=16)
SEQUENCE = SequenceView(
    seq_id=SequenceId("s"), num_tokens=640, expected_tokens=500, num_blocks=40, num_own_blocks=40, num_branches=1
)


def worker(name: str, *, of_view: dict[str, Any] | None = None, **changes: object) -> WorkerSnapshot:
    view = dataclasses.replace(IDLE, incarnation=Incarnation(name), worker_id=name, **(of_view or {}))  # type: ignore[arg-type]
    snapshot = WorkerSnapshot(view=view, model="m", layout="l", sequences=[SEQUENCE] if name == "source" else [])
    return dataclasses.replace(snapshot, **changes)  # type: ignore[arg-type]


SOURCE = worker("source", of_view={"num_running": 1})


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (worker("a", draining=True), "draining"),
        (worker("a", alive=False), "lease"),
        (worker("a", model="other"), "model or layout"),
        (worker("a", layout="other"), "model or layout"),
        (worker("a", of_view={"numerics": "other"}), "other bits"),
        (worker("a", of_view={"num_running": 16}), "no room"),
        (worker("a", of_view={"num_free_blocks": 15}), "no room"),
        (worker("a", of_view={"context_tokens": 640}), "640"),
        (SOURCE, "is there"),
    ],
)
def test_says_why_a_worker_is_not_the_target(target: WorkerSnapshot, reason: str) -> None:
    decision = choose_target(SEQUENCE, SOURCE, [target, worker("b")], {target.view.incarnation: (640, 0)})
    assert decision.worker is not None and decision.worker.worker_id == "b"
    assert [reason in candidate.reason for candidate in decision.candidates if not candidate.eligible] == [True]


@pytest.mark.parametrize("change", [{"is_prefilled": False}, {"has_beams": True}, {"is_suspect": True}])
def test_a_sequence_that_cannot_move_has_no_target(change: dict[str, bool]) -> None:
    decision = choose_target(dataclasses.replace(SEQUENCE, **change), SOURCE, [worker("a")], {})
    assert decision.worker is None and "cannot move" in decision.candidates[0].reason


@given(
    num_free=st.integers(0, 200),
    num_cached=st.integers(0, 200),
    num_running=st.integers(0, 18),
    num_blocks=st.integers(1, 100),
    num_branches=st.integers(1, 4),
    num_hit=st.integers(0, 120),
)
def test_room_is_never_promised_that_is_not_there(
    num_free: int, num_cached: int, num_running: int, num_blocks: int, num_branches: int, num_hit: int
) -> None:
    view = dataclasses.replace(IDLE, num_free_blocks=num_free, num_cached_blocks=num_cached, num_running=num_running)
    sequence = dataclasses.replace(SEQUENCE, num_blocks=num_blocks, num_branches=num_branches)
    hit = (num_hit * BLOCK_SIZE, 0)
    if has_room(view, sequence, hit):
        assert num_running + num_branches <= view.max_batch_sequences
        assert max(0, num_blocks - num_hit) + num_branches + FREE_SHARE * 1000 <= num_free + num_cached
        assert has_any_room(view)
