"""The table of a buddy: what its owners have named last is kept, within a bound, and nothing else."""

import random

import pytest

from gpu_worker.migration.calls.standby_calls import HistoryState, NamedHistory
from gpu_worker.migration.standby.kept_histories import KEEP_S, SILENT_S, KeepChange, KeptHistories, KeptHistory
from octavo.request.ids import BlockHash, Incarnation, SequenceId

A, B = Incarnation("a"), Incarnation("b")


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "big")) for number in numbers]


def named(name: str, *numbers: int, first: int = 0, branch: int = 0) -> NamedHistory:
    return NamedHistory(SequenceId(name), branch, first, hashes(*numbers))


class Numbered(KeptHistories):
    """A table whose calls come in order."""

    num_calls = 0

    def call(self, owner: Incarnation, named: list[NamedHistory], now: float) -> tuple[KeepChange, list[HistoryState]]:
        self.num_calls += 1
        return self.update(owner, self.num_calls, named, now)


def find(table: Numbered, owner: Incarnation, name: str) -> KeptHistory | None:
    return table.find(owner, table.num_calls, (SequenceId(name), 0))


def test_what_is_named_again_is_known_already_and_what_is_not_has_ended() -> None:
    table = Numbered(100)
    change, states = table.call(A, [named("s", 8, 9, first=7)], 0.0)
    assert (change.begun, states) == ([], [HistoryState(0, 0)]), "it does not know the first ones: it says so"
    change, states = table.call(A, [named("s", 1, 2), named("t", 1, 3)], 0.0)
    assert (change.begun, change.ended) == (hashes(1, 2, 3), [])
    assert states == [HistoryState(2, 0), HistoryState(2, 0)]
    change, states = table.call(A, [named("s", 2, 4, first=1)], 1.0)
    assert (change.begun, change.ended) == (hashes(4), hashes(3)), "block 1 is of another history, too"
    assert states == [HistoryState(3, 0)]
    change, _ = table.call(A, [], 2.0)
    assert sorted(change.ended) == hashes(1, 2, 4)
    assert table.num_blocks == table.num_histories == 0


def test_a_call_that_was_overtaken_changes_nothing() -> None:
    table = KeptHistories(100)
    table.update(A, 1, [named("s", 1)], 0.0)
    table.update(A, 3, [], 0.0)
    change, states = table.update(A, 2, [named("s", 2, first=1)], 0.0)
    assert (change, states) == (KeepChange([], []), [HistoryState(0, 0)])
    assert table.num_blocks == 0 and not table.owners


def test_a_history_beyond_the_bound_is_refused_whole_and_the_others_stay() -> None:
    table = Numbered(3)
    table.call(A, [named("s", 1, 2)], 0.0)
    change, states = table.call(B, [named("t", 1, 3), named("u", 4, 5)], 0.0)
    assert states == [HistoryState(2, 0), HistoryState(0, 0, refused=True)]
    assert (change.begun, table.num_blocks, table.num_histories) == (hashes(3), 3, 2)
    change, states = table.call(A, [named("s", 6, first=2)], 0.0)
    assert states == [HistoryState(0, 0, refused=True)], "it has grown too long"
    assert change.ended == hashes(2)
    table.check_uses()


def test_an_owner_that_is_silent_makes_room_for_those_that_live() -> None:
    table = Numbered(4)
    table.call(A, [named("s", 1, 2, 3)], 0.0)
    _, states = table.call(B, [named("t", 1, 5, 6)], SILENT_S - 1)
    assert states == [HistoryState(0, 0, refused=True)]
    table.call(B, [], SILENT_S - 0.5)
    change, states = table.call(B, [named("t", 1, 5, 6)], SILENT_S + 1)
    assert states == [HistoryState(3, 0)]
    assert (sorted(change.ended), change.begun) == (hashes(1, 2, 3), hashes(1, 5, 6))
    table.check_uses()
    _, states = table.call(A, [named("s", 7, first=3)], SILENT_S + 2)
    assert states == [HistoryState(0, 0)], "it is told to begin anew"


def test_histories_outlive_their_owner_for_a_while() -> None:
    table = Numbered(100)
    table.call(A, [named("s", 1)], 0.0)
    table.call(B, [named("t", 2)], 30.0)
    assert table.expire(KEEP_S - 1) == KeepChange([], [])
    assert (table.expire(KEEP_S + 1).ended, table.owners) == (hashes(1), [B])


def test_those_that_lack_least_are_fetched_first() -> None:
    table = Numbered(100)
    table.call(A, [named("long", *range(10, 20)), named("short", 1, 2), named("same", 1, 2)], 0.0)
    histories, lacking = table.lacking(A, 4, 0.0)
    assert lacking == hashes(1, 2, 10, 11)
    assert [each.hashes[0] for each in histories] == hashes(1, 1, 10)
    for each in histories[:2]:
        each.num_held = 2
    histories[2].stalled_until = 5.0
    assert table.lacking(A, 4, 1.0) == ([], [])
    assert table.lacking(A, 4, 6.0)[1] == hashes(10, 11, 12, 13)
    assert table.lacking(B, 4, 6.0) == ([], [])


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_keep_what_was_named_last(seed: int) -> None:
    """What a cache is told adds up to what the table keeps, whatever is named, refused or forgotten."""
    rng, table = random.Random(seed), Numbered(40)
    kept: set[BlockHash] = set()
    now = 0.0
    lengths: dict[tuple[Incarnation, str], int] = {}

    def apply(change: KeepChange) -> None:
        kept.difference_update(change.ended)
        kept.update(change.begun)

    for _ in range(400):
        now += rng.choice([0.1, 1.0, 20.0])
        owner = rng.choice([A, B])
        calls = []
        for name in rng.sample("stuvw", rng.randint(0, 4)):
            known = lengths.get((owner, name), 0)
            first = rng.choice([0, known])
            total = max(known, first) + rng.randint(0, 4)
            offset = 100 * "stuvw".index(name) if rng.random() < 0.9 else 0
            calls.append(named(name, *(offset + i if i > 2 else i for i in range(first, total)), first=first))
        change, states = table.call(owner, calls, now)
        apply(change)
        lengths = {key: length for key, length in lengths.items() if key[0] != owner}
        lengths |= {(owner, call.seq_id): state.num_named for call, state in zip(calls, states, strict=True)}
        apply(table.expire(now))
        if rng.random() < 0.1:
            apply(table.refuse(list(table.all())[:1]))
        table.check_uses()
        assert kept == {each for history in table.all() for each in history.hashes}
        assert len(kept) == table.num_blocks <= 40


def test_a_tail_ends_with_its_history() -> None:
    table = Numbered(3)
    table.call(A, [named("s", 1, 2)], 0.0)
    (tail,) = hashes(9)
    assert table.set_tail(find(table, A, "s"), tail) == []
    assert find(table, A, "t") is find(table, B, "s") is table.find(A, 0, (SequenceId("s"), 0)) is None
    assert table.num_blocks == 3
    change, _ = table.call(A, [named("s", 3, first=2)], 1.0)
    assert change.ended == [*hashes(1, 2), tail], "there was no room"
    table.check_uses()
    assert table.call(A, [], 3.0)[0].ended == []


def test_a_tail_of_two_histories_ends_with_the_second_and_takes_room() -> None:
    table = Numbered(2)
    table.call(A, [named("s", 1), named("t", 1)], 0.0)
    one, two = find(table, A, "s"), find(table, A, "t")
    tail, later = hashes(8, 9)
    assert table.set_tail(one, tail) == table.set_tail(two, tail) == []
    assert table.set_tail(one, later) == [] and one.tail is None, "there is no room"
    assert table.set_tail(two, later) == [tail] and two.tail == later
    table.check_uses()
    assert table.call(A, [], 1.0)[0].ended == [*hashes(1), later]
    assert table.num_blocks == 0
