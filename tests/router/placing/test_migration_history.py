import dataclasses

import pytest

from octavo.request.ids import Incarnation, SequenceId
from router.fleet.worker_snapshot import SequenceView
from router.placing.migration_history import (
    MIN_EXPECTED_TOKENS,
    RETURN_S,
    MigrationHistory,
    PastMigration,
)

A, B, C = Incarnation("a"), Incarnation("b"), Incarnation("c")
SEQUENCE = SequenceView(
    seq_id=SequenceId("s"), num_tokens=100, expected_tokens=100, num_blocks=7, num_own_blocks=7, num_branches=1
)


def moved(at: float, source: Incarnation = A, target: Incarnation = B, **changes: bool) -> PastMigration:
    return PastMigration(SEQUENCE.seq_id, source, target, at, **changes)


def test_a_sequence_rests_and_does_not_return() -> None:
    for now, may_move, returns in ((105.0, False, True), (111.0, True, True), (100.0 + RETURN_S, True, False)):
        history = MigrationHistory([moved(100.0)], now)
        assert history.may_move(SEQUENCE) == may_move and history.returns(SEQUENCE, A) == returns
        assert not history.returns(SEQUENCE, C)


def test_a_sequence_moves_twice_a_minute_at_most() -> None:
    past = [moved(100.0), moved(115.0, B, C)]
    assert not MigrationHistory(past, 140.0).may_move(SEQUENCE)
    assert MigrationHistory(past, 100.0 + RETURN_S).may_move(SEQUENCE)


@pytest.mark.parametrize(
    "change",
    [
        {"expected_tokens": MIN_EXPECTED_TOKENS - 1},
        {"is_prefilled": False},
        {"has_beams": True},
        {"is_suspect": True},
    ],
)
def test_what_ends_soon_or_cannot_move_stays(change: dict[str, int]) -> None:
    assert not MigrationHistory([], 100.0).may_move(dataclasses.replace(SEQUENCE, **change))
