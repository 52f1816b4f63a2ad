"""The table of an owner: which hashes each buddy has still to be told, and when it is to be called."""

from gpu_worker.migration.calls.standby_calls import HistoryState
from gpu_worker.migration.standby import covered_sequences
from gpu_worker.migration.standby.covered_sequences import CoveredSequences, note_state
from gpu_worker.scheduling.standby_blocks import HistoryKey
from octavo.request.ids import BlockHash, Incarnation, SequenceId

B, C = Incarnation("b"), Incarnation("c")


def key(name: str, branch: int = 0, epoch: int = 1) -> HistoryKey:
    return HistoryKey(SequenceId(name), epoch, branch)


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(bytes([number]) * 16) for number in numbers]


def covered(**found: list[BlockHash]) -> CoveredSequences:
    """Sequences that all have the buddy B."""
    table = CoveredSequences()
    table.update({key(name): numbers for name, numbers in found.items()})
    for sequence in table.without_buddy():
        sequence.choose(B)
    return table


def test_a_buddy_is_told_what_it_does_not_know_and_nothing_twice() -> None:
    table = covered(s=hashes(1, 2), t=hashes(3))
    assert table.has_news(B) and not table.has_news(C)
    for named, branch, _ in table.named(B, 100):
        note_state(branch, HistoryState(named.first + len(named.hashes), 1))
    assert not table.has_news(B)
    assert (table.num_covered, table.num_sealed_blocks, table.num_held_blocks) == (2, 3, 2)
    table.update({key("s"): hashes(4), key("t"): []})
    assert [(named.seq_id, named.first, named.hashes) for named, _, _ in table.named(B, 100)] == [
        ("s", 2, hashes(4)),
        ("t", 1, []),
    ]


def test_the_end_of_a_sequence_is_news_once() -> None:
    table = covered(s=hashes(1), t=hashes(2))
    for _, branch, _ in table.named(B, 100):
        note_state(branch, HistoryState(1, 1))
    table.update({key("t"): []})
    assert table.has_news(B)
    assert [named.seq_id for named, _, _ in table.named(B, 100)] == ["t"]
    assert not table.has_news(B)


def test_another_buddy_is_told_everything() -> None:
    table = covered(s=hashes(1, 2))
    for _, branch, _ in table.named(B, 100):
        note_state(branch, HistoryState(2, 2))
    table.leave([B])
    (sequence,) = table.without_buddy()
    sequence.choose(C)
    ((named, _, _),) = table.named(C, 100)
    assert (named.first, named.hashes) == (0, hashes(1, 2))
    assert table.num_covered == 0


def test_a_call_names_all_histories_and_few_of_many_hashes() -> None:
    table = covered(s=hashes(1, 2, 3), t=hashes(4, 5))
    assert [named.hashes for named, _, _ in table.named(B, 4)] == [hashes(1, 2, 3), hashes(4)]
    assert [named.hashes for named, _, _ in table.named(B, 0)] == [[], []]


def test_another_epoch_is_another_sequence() -> None:
    table = covered(s=hashes(1, 2))
    table.update({key("s", epoch=3): hashes(7)})
    assert table.known() == {key("s", epoch=3): 1}
    assert len(table.without_buddy()) == 1


def test_an_answer_for_more_than_there_is_counts_what_there_is() -> None:
    table = covered(s=hashes(1, 2))
    ((_, branch, _),) = table.named(B, 100)
    note_state(branch, HistoryState(9, 9))
    assert (branch.num_named, branch.num_held) == (2, 2)


def test_no_more_sequences_than_the_bound(monkeypatch) -> None:
    monkeypatch.setattr(covered_sequences, "MOST_SEQUENCES", 2)
    table = covered(s=hashes(1), t=hashes(2), u=hashes(3))
    assert len(table.named(B, 100)) == 2
