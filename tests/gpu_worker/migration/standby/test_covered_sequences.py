"""The table of an owner: which hashes each buddy has still to be told, and when it is to be called."""

from gpu_worker.migration.calls.standby_calls import HistoryState
from gpu_worker.migration.standby import covered_sequences
from gpu_worker.migration.standby.covered_sequences import CoveredSequences, note_state
from gpu_worker.scheduling.standby_blocks import HistoryKey
from octavo.request.ids import BlockHash, Incarnation, SequenceId

B, C = Incarnation("b"), Incarnation("c")


def key(name: str, epoch: int = 1) -> HistoryKey:
    return HistoryKey(SequenceId(name), epoch, 0)


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(bytes([number]) * 16) for number in numbers]


def covered(**found: list[BlockHash]) -> CoveredSequences:
    """Sequences that all have the buddy B."""
    table = CoveredSequences()
    table.update({key(name): numbers for name, numbers in found.items()})
    for sequence in table.without_buddy():
        sequence.choose(B)
    return table


def told(table: CoveredSequences, buddy: Incarnation = B, limit: int = 100) -> list[tuple[str, int, list[BlockHash]]]:
    return [(named.seq_id, named.first, named.hashes) for named, _, _ in table.named(buddy, limit)]


def test_a_buddy_is_told_what_it_does_not_know_and_nothing_twice() -> None:
    table = covered(s=hashes(1, 2), t=hashes(3))
    assert table.has_news(B) and not table.has_news(C)
    for named, branch, _ in table.named(B, 100):
        note_state(branch, HistoryState(named.first + len(named.hashes), 1))
    assert not table.has_news(B)
    assert (table.num_covered, table.num_sealed_blocks, table.num_held_blocks) == (2, 3, 2)
    table.update({key("s"): hashes(4), key("t"): []})
    assert told(table) == [("s", 2, hashes(4)), ("t", 1, [])]
    for _, branch, _ in table.named(B, 100):
        note_state(branch, HistoryState(9, 9))  # it says more than there is
        assert branch.num_named == branch.num_held <= 3
    table.update({key("t"): []})
    assert table.has_news(B), "a sequence has ended"
    assert told(table) == [("t", 1, [])]
    assert not table.has_news(B)
    table.leave([B])
    (sequence,) = table.without_buddy()
    sequence.choose(C)
    assert told(table, C) == [("t", 0, hashes(3))], "another buddy is told everything"
    assert table.num_covered == 0


def test_a_call_names_all_histories_and_few_of_many_hashes(monkeypatch) -> None:
    table = covered(s=hashes(1, 2, 3), t=hashes(4, 5))
    assert [named for *_, named in told(table, limit=4)] == [hashes(1, 2, 3), hashes(4)]
    assert [named for *_, named in told(table, limit=0)] == [[], []]
    monkeypatch.setattr(covered_sequences, "MOST_SEQUENCES", 2)
    assert len(told(covered(s=hashes(1), t=hashes(2), u=hashes(3)))) == 2


def test_another_epoch_is_another_sequence() -> None:
    table = covered(s=hashes(1, 2))
    table.update({key("s", epoch=3): hashes(7)})
    assert table.known() == {key("s", epoch=3): 1}
    assert len(table.without_buddy()) == 1


def test_tails_go_by_turns_where_the_buddy_has_almost_all_blocks() -> None:
    table = covered(s=hashes(1, 2, 3), t=hashes(4), u=hashes(*range(5, 11)))
    assert table.next_tail(B) is None, "the buddy has nothing"
    for _, branch, _ in table.named(B, 100):
        note_state(branch, HistoryState(9, 1))
    turns = []
    for number in range(4):
        key, branch = table.next_tail(B)
        branch.tail_at = float(number)
        turns.append(key.seq_id)
    assert turns == ["s", "t", "s", "t"]
    assert table.next_tail(C) is None
