"""A client gets each token once, in whatever order the journals and the worker tell of it."""

from dataclasses import replace

import pytest
from accepted import accepted_sequence
from hypothesis import given
from hypothesis import strategies as st

from octavo.request.errors import BadLogits, HistoryLost
from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.ids import SequenceId
from octavo.request.record import Snapshot, first_record
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore
from octavo.request.step_item import StepItem, WaitingItems
from octavo.text.byte_tokenizer import ByteTokenizer
from octavo.text.stop import TextStream
from router.streaming.branch_reader import BranchPiece
from router.streaming.delivery import Delivery, StoppedBranch
from router.streaming.resume_tokens import StreamPlace, StreamStart

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


def test_the_score_at_a_stop_string_outlives_what_the_journal_says_of_the_branch_s_end():
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


def test_a_late_client_learns_the_score_at_a_stop_string_that_is_not_settled():
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


@pytest.mark.parametrize("by_journal", [True, False])
@pytest.mark.parametrize(("output", "unsettled"), [(b"aqb", True), (b"abq", False), (b"abc", False)])
def test_an_end_before_the_journalled_one_is_to_be_settled(by_journal: bool, output: bytes, unsettled: bool):
    delivery, snapshot = delivery_of(ALONE)
    record = snapshot.record
    if by_journal:
        record.finishes, record.final_lengths = (LENGTH,), (3,)
        delivery.add_journals(Snapshot(record, PROMPT, (tuple(output),), 0), [0])
    else:
        assert delivery.add_item(item(0, 0, output, chain_after(output), LENGTH))
    assert delivery.ended
    assert delivery.unsettled == unsettled


def test_a_stop_string_that_is_settled_stays_so():
    delivery, snapshot = delivery_of(ALONE)
    record = snapshot.record
    record.finishes, record.final_lengths = (FinishReason.STOP,), (2,)
    delivery.add_journals(Snapshot(record, PROMPT, (tuple(b"aqb"),), 0), [0])
    assert delivery.ended
    assert not delivery.unsettled


def test_what_comes_after_a_stop_string_is_no_gap():
    delivery, _ = delivery_of(ALONE)
    for index in range(4):
        chain = chain_after(b"aqbc"[: index + 1])
        assert delivery.add_item(item(0, index, b"aqbc"[index : index + 1], chain, NONE))
    assert delivery.stopped_branches() == [StoppedBranch(0, 2, None)]


def test_places_move_with_the_pieces_that_are_given_out():
    delivery, _ = delivery_of(SamplingParams(seed=1, n=2, max_tokens=9))
    start = StreamPlace(0, prompt_chain(PROMPT), 0)
    for branch, output in enumerate((b"xyz", b"a")):
        assert delivery.add_item(item(branch, 0, output, chain_after(output)))
    assert list(delivery.places) == [start, start]
    for branch in range(2):
        piece = delivery.next_piece()
        assert piece.branch == branch
        assert delivery.places[branch] == piece.place
    assert [place.next_index for place in delivery.places] == [3, 1]
    assert delivery.next_piece() is None


@pytest.mark.parametrize("scored", [True, False])
def test_what_a_slow_client_has_not_taken_is_one_piece(scored: bool):
    delivery, _ = delivery_of(replace(ALONE, stop=()))
    for index in range(4):
        scores = [TokenScore(b"abcd"[index], -1.0 * index)] if scored else []
        made = item(0, index, b"abcd"[index : index + 1], chain_after(b"abcd"[: index + 1]))
        made.scores = scores
        assert delivery.add_item(made)
    (piece,) = pieces_of(delivery)
    assert (bytes(piece.token_ids), piece.text, piece.place.next_index) == (b"abcd", "abcd", 4)
    assert [score.logprob for score in piece.token_scores] == ([0.0, -1.0, -2.0, -3.0] if scored else [])


def test_a_failed_item_is_a_failure_to_settle():
    delivery, _ = delivery_of(ALONE)
    failed = item(0, 0, b"", prompt_chain(PROMPT), FinishReason.ERROR)
    failed.failure = BadLogits("no finite logit").failure()
    assert delivery.add_item(failed)
    assert delivery.ended
    assert delivery.unsettled
    assert delivery.failure == failed.failure


def test_a_journal_without_what_an_item_has_brought_is_not_delivered():
    delivery, snapshot = delivery_of(ALONE)
    delivery.add_journals(Snapshot(snapshot.record, PROMPT, (tuple(b"a"),), 0), [0])
    assert delivery.add_item(item(0, 1, [ord("b")], chain_after(b"ab")))
    assert (delivery.next_indexes, delivery.unconfirmed_indexes) == ([2], [1])
    with pytest.raises(HistoryLost):
        delivery.add_journals(Snapshot(snapshot.record, PROMPT, (tuple(b"xy"),), 0), delivery.unconfirmed_indexes)
    assert [bytes(piece.token_ids) for piece in pieces_of(delivery)] == [b"ab"], "and nothing of the other history"
    delivery.add_journals(Snapshot(snapshot.record, PROMPT, (tuple(b"bc"),), 0), delivery.unconfirmed_indexes)
    assert (delivery.next_indexes, delivery.unconfirmed_indexes) == ([3], [3])


@given(st.lists(st.sampled_from("abqé"), min_size=1, max_size=12).map("".join), st.data())
def test_items_that_have_waited_bring_what_they_would_have_brought_one_by_one(text, data):
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
