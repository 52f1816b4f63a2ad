"""Moves are what records tell of changed owners: each once, the newest first, and no more than fit."""

from dataclasses import replace

from accepted import accepted_sequence

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import TimelineEntry, first_record
from router.admin.move_log import MAX_MOVES, MoveLog, MoveReason


def record(name, *timeline, accepted_ms=1000):
    accepted = first_record(accepted_sequence(request_id=f"r-{name}", tenant="t", seq_id=SequenceId(name)))
    lines = tuple(TimelineEntry(*entry) for entry in timeline)
    return replace(accepted, accepted_ms=accepted_ms, timeline=lines)


LIFE = record(
    "a",
    (0, "queued", "router"),
    (5, "taken", "w1 queued"),
    (9, "migrating", "w2"),
    (10, "migrated", "w2"),
    (20, "taken", "w3 lease"),
    (25, "taken", "w3 refused"),
    (30, "requeued", "w3 released by the worker"),
    (40, "taken", "w1 queued"),
    (50, "taken", "w2 connection worker w1: Schedule: UNAVAILABLE"),
)


def test_moves_are_told_once_by_our_clock():
    names = {"w1": "worker-1", "w2": "worker-2"}
    log = MoveLog(lambda worker: names.get(worker, ""))
    log.note_records([LIFE], now_ms=1150, now=7.0)
    log.note_records([LIFE], now_ms=1950, now=7.8)
    newest, *_, oldest = log.moves
    assert len(log.moves) == 4
    assert (newest.source, newest.target, newest.reason) == ("worker-1", "worker-2", MoveReason.TAKEN_OVER)
    assert (newest.request_id, newest.tenant) == ("r-a", "t")
    assert (round(newest.at, 3), round(oldest.at, 3)) == (6.9, 6.86)
    assert {move.source for move in log.moves} == {"worker-1", "worker-2", "w3"}
    assert [move.number for move in log.moves] == [4, 3, 2, 1]
    assert [move.seen for move in log.moves] == ["worker w1: Schedule: UNAVAILABLE", "released by the worker", "", ""]


def test_the_oldest_moves_make_room():
    log = MoveLog(lambda worker: "")
    lives = [
        record(str(i), (0, "taken", "w1 queued"), (1, "migrated", Incarnation("w2")), accepted_ms=i) for i in range(70)
    ]
    log.note_records(lives, now_ms=100, now=1.0)
    log.note_records(lives[:3], now_ms=100, now=1.0)
    assert [move.seq_id for move in log.moves] == [str(i) for i in reversed(range(70 - MAX_MOVES, 70))]
