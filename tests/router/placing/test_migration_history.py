import dataclasses

import pytest

from octavo.request.ids import Incarnation, SequenceId
from router.fleet.worker_snapshot import SequenceView
from router.placing.migration_history import (
    MIN_EXPECTED_TOKENS,
    REST_S,
    RETURN_S,
    MigrationHistory,
    PastMigration,
    ProposedMigration,
)

A, B, C = Incarnation("a"), Incarnation("b"), Incarnation("c")
SEQUENCE = SequenceView(
    seq_id=SequenceId("s"), num_tokens=100, expected_tokens=100, num_blocks=7, num_own_blocks=7, num_branches=1
)


def moved(at: float, source: Incarnation = A, target: Incarnation = B, **changes: bool) -> PastMigration:
    return PastMigration(SEQUENCE.seq_id, source, target, at, **changes)


@pytest.mark.parametrize(("source", "target"), [(A, B), (B, A)])
def test_two_workers_rest_in_both_directions(source: Incarnation, target: Incarnation) -> None:
    assert MigrationHistory([moved(100.0)], 100.0 + REST_S - 0.1).rests(source, target)
    assert not MigrationHistory([moved(100.0)], 100.0 + REST_S).rests(source, target)
    assert not MigrationHistory([moved(100.0)], 101.0).rests(source, C)


def test_a_migration_under_way_lets_nothing_begin_however_long_it_takes() -> None:
    history = MigrationHistory([moved(100.0, under_way=True)], 100.0 + 2 * RETURN_S)
    assert history.rests(A, B) and not history.may_move(SEQUENCE)


def test_a_sequence_rests_and_does_not_return() -> None:
    for now, may_move, returns in ((105.0, False, True), (111.0, True, True), (100.0 + RETURN_S, True, False)):
        history = MigrationHistory([moved(100.0)], now)
        assert history.may_move(SEQUENCE) == may_move and history.returns(SEQUENCE, A) == returns
        assert not history.returns(SEQUENCE, C)


def test_a_sequence_moves_twice_a_minute_at_most() -> None:
    past = [moved(100.0), moved(115.0, B, C)]
    assert not MigrationHistory(past, 140.0).may_move(SEQUENCE)
    assert MigrationHistory(past, 100.0 + RETURN_S).may_move(SEQUENCE)


def test_what_others_moved_is_known_by_the_sequence_itself() -> None:
    history = MigrationHistory([], 100.0)
    assert not history.may_move(dataclasses.replace(SEQUENCE, last_moved_at=95.0))
    assert history.may_move(dataclasses.replace(SEQUENCE, last_moved_at=90.0))


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


def test_what_is_proposed_counts_at_once() -> None:
    history = MigrationHistory([], 100.0)
    history.add(ProposedMigration(SEQUENCE.seq_id, A, B, ""))
    assert history.rests(B, A) and not history.may_move(SEQUENCE)
