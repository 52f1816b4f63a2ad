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


class Client:
    """A client of a request that has just been accepted, and what its journals and its record say."""

    def __init__(self, params=RANKED):
        self.record = first_record(accepted_sequence(PROMPT, params))
        detokenizer = ByteTokenizer().detokenizer
        self.delivery = Delivery(
            self.record, params, lambda: TextStream.of_branch(detokenizer(), params, ()), StreamStart(fresh=True)
        )

    def hear(self, branch, first, text, score=None, finish=NONE):
        """An item of the worker whose end is that of a text."""
        chain = extend_chain(prompt_chain(PROMPT), text)
        assert self.delivery.add_item(item(branch, first, text[first:], chain, finish, score))

    def read(self, *journals, at=(0, 0), **of_record):
        """The journals from some places on."""
        for name, value in of_record.items():
            setattr(self.record, name, value)
        self.delivery.add_journals(Snapshot(self.record, PROMPT, tuple(map(tuple, journals)), 0), at)

    def pieces(self):
        return list(iter(self.delivery.next_piece, None))

    def ends_with(self, score, *, cut=None):
        """Whether the first branch is cut at the stop string, and is returned with that score."""
        assert self.delivery.stopped_branches() == ([] if cut is None else [StoppedBranch(0, 2, cut)])
        assert self.delivery.score_of(0) == score
        return self.delivery.ended and [bytes(piece.token_ids) for piece in self.pieces()] == [b"aq"]


def item(branch, first_index, token_ids, chain, finish=NONE, score=None):
    return StepItem(SequenceId("s"), 1, branch, first_index, token_ids, chain, finish, cumulative_logprob=score)


ENDED = {"finishes": (LENGTH, LENGTH), "final_lengths": (3, 3)}


def test_the_score_at_a_stop_string_stays():
    """The worker generates on until it is told of the stop string: its score is of more tokens than the client has."""
    client = Client()
    for first, text, score in ((0, b"a", -1.0), (1, b"aq", -2.0), (2, b"aqb", -9.0)):
        client.hear(0, first, text, score)
    client.read(b"", b"xyz", at=client.delivery.next_indexes, **ENDED, scores=(-9.0, -4.0))
    assert client.ends_with(-2.0, cut=-2.0)


def test_a_late_client_learns_an_unsettled_score():
    """The worker has gone past the stop string to another end, and still runs the other branch."""
    client = Client()
    client.read(b"aqb", b"x", finishes=(LENGTH, NONE), final_lengths=(3, 1), scores=(-9.0, None))
    assert (client.delivery.next_indexes, client.delivery.missing_indexes) == ([2, 0], [1, 0])
    assert not client.delivery.stopped_branches(), "with the score of another length"
    client.hear(0, 1, b"aq", -2.0)  # what the worker sends from there
    client.hear(0, 2, b"aqb", -9.0)
    assert client.delivery.unsettled and client.delivery.missing_indexes == [2, 0]
    client.hear(1, 0, b"xyz", -4.0, LENGTH)
    assert client.ends_with(-2.0, cut=-2.0)


def test_a_stop_string_in_tokens_without_a_score_waits_for_the_score_of_the_end():
    """A new owner sends what the journal had without scores, where the answers of the old one were lost."""
    client = Client()
    client.hear(0, 0, b"aq")
    client.hear(1, 0, b"xyz", -4.0, LENGTH)
    delivery = client.delivery
    assert (delivery.ended, delivery.stopped_branches(), delivery.next_piece()) == (False, [], None)
    client.hear(0, 2, b"aqb", -2.0)
    assert not delivery.ended, "how far the worker is by now says nothing"
    client.hear(0, 3, b"aqbc", -3.0, LENGTH)
    assert delivery.unsettled and client.ends_with(-3.0, cut=-3.0)


def test_an_end_without_a_score_leaves_the_score_to_the_record():
    """The worker died after the end, and the next one found the whole branch in the journal."""
    client = Client()
    client.hear(0, 0, b"aq")
    client.hear(0, 2, b"aqbc", None, LENGTH)
    client.hear(1, 0, b"xyz", -4.0, LENGTH)
    assert not client.delivery.ended
    client.read(b"aqbc", b"xyz", finishes=(LENGTH, LENGTH), final_lengths=(4, 3), scores=(-3.0, -4.0))
    assert client.delivery.ended and client.delivery.score_of(0) == -3.0
    client.hear(0, 2, b"aqbc", None, LENGTH)  # said again
    assert client.delivery.score_of(0) == -3.0


def test_an_ended_record_is_told_of_a_cut():
    """No worker sends the score at the stop string any more: the record's scores decide, for every client alike."""
    client = Client()
    client.read(b"aqb", b"xyz", state=SequenceState.DONE, **ENDED, scores=(-3.0, -4.0))
    assert client.delivery.unsettled and client.ends_with(-3.0, cut=-3.0)


def test_a_journal_behind_an_item_is_not_delivered():
    client = Client(ALONE)
    delivery = client.delivery
    client.read(b"a", at=[0])
    client.hear(0, 1, b"ab")
    assert (delivery.next_indexes, delivery.unconfirmed_indexes) == ([2], [1])
    with pytest.raises(HistoryLost):
        client.read(b"xy", at=delivery.unconfirmed_indexes)
    assert [bytes(piece.token_ids) for piece in client.pieces()] == [b"ab"], "and nothing of the other history"
    client.read(b"bc", at=delivery.unconfirmed_indexes)
    assert (delivery.next_indexes, delivery.unconfirmed_indexes) == ([3], [3])


@given(st.lists(st.sampled_from("abqé"), min_size=1, max_size=12).map("".join), st.data())
def test_waiting_items_bring_what_single_ones_bring(text, data):
    """However many wait together, and however often some come again: tokens, text and end are the same."""
    output = text.encode()
    sides, waiting, sent = (Client(ALONE), Client(ALONE)), WaitingItems(), 0
    singly, joined = (side.delivery for side in sides)
    given_out: list[list[BranchPiece]] = [[], []]
    while sent < len(output):
        first = max(0, sent - data.draw(st.integers(0, 2)))
        sent = data.draw(st.integers(sent + 1, len(output)))
        finish = LENGTH if sent == len(output) else NONE
        made = item(0, first, output[first:sent], extend_chain(prompt_chain(PROMPT), output[:sent]), finish)
        assert singly.add_item(made)
        waiting.add(made)
        given_out[0] += sides[0].pieces()
        if finish or data.draw(st.booleans()):
            assert all(joined.add_item(each) for each in waiting.take_items())
            given_out[1] += sides[1].pieces()
    told = [
        (b"".join(bytes(piece.token_ids) for piece in side), "".join(piece.text for piece in side), side[-1].finish)
        for side in given_out
    ]
    assert told[0] == told[1]
    assert [piece.first_index for piece in given_out[1]] == sorted({piece.first_index for piece in given_out[1]})
    assert singly.places == joined.places
