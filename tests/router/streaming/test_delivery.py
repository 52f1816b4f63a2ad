"""A client gets each token once, in whatever order the journals and the worker tell of it."""

import pytest
from accepted import accepted_sequence
from hypothesis import given
from hypothesis import strategies as st

from octavo.request.errors import HistoryLost
from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.ids import SequenceId
from octavo.request.record import SequenceState, Snapshot, first_record
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.request.step_item import StepItem, WaitingItems
from octavo.text.stop import TextStream
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from router.streaming.branch_reader import BranchPiece
from router.streaming.delivery import Delivery, StoppedBranch
from router.streaming.resume_tokens import StreamStart

PROMPT = (1, 2)
RANKED = SamplingParams(seed=1, best_of=2, max_tokens=9, stop=("q",))
ALONE = SamplingParams(seed=1, max_tokens=9, stop=("q",))
NONE, LENGTH = FinishReason.NONE, FinishReason.LENGTH


def delivery_of(params: SamplingParams) -> tuple[Delivery, Snapshot]:
    """The delivery of a request that has just been accepted, and a snapshot of its record without any output."""
    record = first_record(accepted_sequence(PROMPT, params))

    def text() -> TextStream:
        return TextStream.of_branch(ByteTokenizer().detokenizer(), params, ())

    return Delivery(record, params, text, StreamStart(fresh=True)), Snapshot(
        record, PROMPT, ((),) * params.num_branches, 0
    )


def item(branch, first_index, token_ids, chain, finish=NONE, score=None) -> StepItem:
    return StepItem(SequenceId("s"), 1, branch, first_index, token_ids, chain, finish, cumulative_logprob=score)


def pieces_of(delivery: Delivery) -> list[BranchPiece]:
    return list(iter(delivery.next_piece, None))


def test_the_score_at_a_stop_string_stays():
    """The worker generates on until it is told of the stop string: its score is of more tokens than the client has."""
    delivery, snapshot = delivery_of(RANKED)
    for index, (token, score) in enumerate([(ord("a"), -1.0), (ord("q"), -2.0), (ord("b"), -9.0)]):
        chain = extend_chain(prompt_chain(PROMPT), b"aqb"[: index + 1])
        assert delivery.add_item(item(0, index, [token], chain, NONE, score))
    snapshot.record.finishes = (LENGTH, LENGTH)
    snapshot.record.final_lengths = (3, 3)
    snapshot.record.scores = (-9.0, -4.0)
    delivery.add_journals(Snapshot(snapshot.record, PROMPT, ((), tuple(b"xyz")), 0), delivery.next_indexes)
    assert delivery.ended
    assert delivery.stopped_branches() == [StoppedBranch(0, 2, -2.0)]
    assert delivery.returned_scores() == [-2.0]
    assert [bytes(piece.token_ids) for piece in pieces_of(delivery)] == [b"aq"]


def chain_after(output: bytes) -> int:
    return extend_chain(prompt_chain(PROMPT), output)


def test_a_late_client_learns_an_unsettled_score():
    """The worker has gone past the stop string to another end, and still runs the other branch."""
    delivery, snapshot = delivery_of(RANKED)
    record = snapshot.record
    record.finishes, record.final_lengths, record.scores = (LENGTH, NONE), (3, 1), (-9.0, None)
    delivery.add_journals(Snapshot(record, PROMPT, (tuple(b"aqb"), tuple(b"x")), 0), [0, 0])
    assert (delivery.next_indexes, delivery.missing_indexes) == ([2, 0], [1, 0])
    assert not delivery.stopped_branches(), "with the score of another length"
    for index, score in ((1, -2.0), (2, -9.0)):  # what the worker sends from there
        chain = chain_after(b"aqb"[: index + 1])
        assert delivery.add_item(item(0, index, b"aqb"[index : index + 1], chain, NONE, score))
    assert delivery.unsettled
    assert delivery.stopped_branches() == [StoppedBranch(0, 2, -2.0)]
    assert delivery.missing_indexes == [2, 0]
    assert delivery.add_item(item(1, 0, b"xyz", chain_after(b"xyz"), LENGTH, -4.0))
    assert delivery.returned_scores() == [-2.0]
    assert [bytes(piece.token_ids) for piece in pieces_of(delivery)] == [b"aq"]


def test_a_stop_string_in_tokens_without_a_score_waits_for_the_score_of_the_end():
    """A new owner sends what the journal had without scores, where the answers of the old one were lost."""
    delivery, _ = delivery_of(RANKED)
    assert delivery.add_item(item(0, 0, b"aq", chain_after(b"aq")))
    assert delivery.add_item(item(1, 0, b"xyz", chain_after(b"xyz"), LENGTH, -4.0))
    assert (delivery.ended, delivery.stopped_branches(), delivery.next_piece()) == (False, [], None)
    assert delivery.add_item(item(0, 2, b"b", chain_after(b"aqb"), NONE, -2.0))
    assert not delivery.ended, "how far the worker is by now says nothing"
    assert delivery.add_item(item(0, 3, b"c", chain_after(b"aqbc"), LENGTH, -3.0))
    assert delivery.ended and delivery.unsettled
    assert delivery.stopped_branches() == [StoppedBranch(0, 2, -3.0)]
    assert [bytes(piece.token_ids) for piece in pieces_of(delivery)] == [b"aq"]


def test_an_end_without_a_score_leaves_the_score_to_the_record():
    """The worker died after the end, and the next one found the whole branch in the journal."""
    delivery, snapshot = delivery_of(RANKED)
    record = snapshot.record
    assert delivery.add_item(item(0, 0, b"aq", chain_after(b"aq")))
    assert delivery.add_item(item(0, 2, b"bc", chain_after(b"aqbc"), LENGTH))
    assert delivery.add_item(item(1, 0, b"xyz", chain_after(b"xyz"), LENGTH, -4.0))
    assert not delivery.ended
    record.finishes, record.final_lengths, record.scores = (LENGTH, LENGTH), (4, 3), (-3.0, -4.0)
    delivery.add_journals(Snapshot(record, PROMPT, (b"aqbc", b"xyz"), 0), (0, 0))
    assert delivery.ended and delivery.returned_scores() == [-3.0]
    assert delivery.add_item(item(0, 2, b"bc", chain_after(b"aqbc"), LENGTH)), "said again"
    assert delivery.returned_scores() == [-3.0]


def test_an_ended_record_is_told_of_a_cut():
    """No worker sends the score at the stop string any more: the record's scores decide, for every client alike."""
    delivery, snapshot = delivery_of(RANKED)
    record = snapshot.record
    record.state, record.finishes, record.final_lengths = SequenceState.DONE, (LENGTH, LENGTH), (3, 3)
    record.scores = (-3.0, -4.0)
    delivery.add_journals(Snapshot(record, PROMPT, (tuple(b"aqb"), tuple(b"xyz")), 0), [0, 0])
    assert delivery.ended and delivery.unsettled
    assert delivery.stopped_branches() == [StoppedBranch(0, 2, -3.0)]
    assert [bytes(piece.token_ids) for piece in pieces_of(delivery)] == [b"aq"]


@given(st.lists(st.sampled_from("abqé"), min_size=1, max_size=12).map("".join), st.data())
def test_waiting_items_bring_what_single_ones_bring(text, data):
    """However many wait together, and however often some come again: tokens, text and end are the same."""
    output = text.encode()
    singly, joined = delivery_of(ALONE)[0], delivery_of(ALONE)[0]
    given_out: list[list[BranchPiece]] = [[], []]
    waiting, sent = WaitingItems(), 0
    while sent < len(output):
        first = max(0, sent - data.draw(st.integers(0, 2)))
        sent = data.draw(st.integers(sent + 1, len(output)))
        finish = LENGTH if sent == len(output) else NONE
        made = item(0, first, output[first:sent], extend_chain(prompt_chain(PROMPT), output[:sent]), finish)
        assert singly.add_item(made)
        waiting.add(made)
        given_out[0] += pieces_of(singly)
        if finish or data.draw(st.booleans()):
            assert all(joined.add_item(each) for each in waiting.take_items())
            given_out[1] += pieces_of(joined)
    told = [
        (b"".join(bytes(piece.token_ids) for piece in side), "".join(piece.text for piece in side), side[-1].finish)
        for side in given_out
    ]
    assert told[0] == told[1]
    assert [piece.first_index for piece in given_out[1]] == sorted({piece.first_index for piece in given_out[1]})
    assert singly.places == joined.places


def test_a_journal_behind_an_item_is_not_delivered():
    delivery, snapshot = delivery_of(ALONE)
    delivery.add_journals(Snapshot(snapshot.record, PROMPT, (tuple(b"a"),), 0), [0])
    assert delivery.add_item(item(0, 1, [ord("b")], chain_after(b"ab")))
    assert (delivery.next_indexes, delivery.unconfirmed_indexes) == ([2], [1])
    with pytest.raises(HistoryLost):
        delivery.add_journals(Snapshot(snapshot.record, PROMPT, (tuple(b"xy"),), 0), delivery.unconfirmed_indexes)
    assert [bytes(piece.token_ids) for piece in pieces_of(delivery)] == [b"ab"], "and nothing of the other history"
    delivery.add_journals(Snapshot(snapshot.record, PROMPT, (tuple(b"bc"),), 0), delivery.unconfirmed_indexes)
    assert (delivery.next_indexes, delivery.unconfirmed_indexes) == ([3], [3])
