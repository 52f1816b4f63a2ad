"""What one client has: whatever the journal and the worker say, and in whichever order."""

from octavo.hashing import extend_chain, prompt_chain
from octavo.ids import Incarnation, RequestId, SequenceId
from octavo.record import NewSequence, Snapshot, first_record
from octavo.sampling import FinishReason, SamplingParams
from octavo.text.byte_tokenizer import ByteTokenizer
from octavo.text.stop import TextStream
from router.delivery import Delivery
from router.resume import Start

PROMPT = (1, 2)
PARAMS = SamplingParams(seed=1, best_of=2, max_tokens=9, stop=("q",))


def ranked_delivery() -> tuple[Delivery[None], Snapshot]:
    new = NewSequence(
        seq_id=SequenceId("s"),
        request_id=RequestId("r"),
        body_hash=b"",
        tenant="",
        salt="",
        model="m",
        layout="l",
        sampling=b"",
        prompt=PROMPT,
        prompt_chain=prompt_chain(PROMPT),
        num_branches=2,
        max_tokens=9,
        priority=0,
        deadline_in_ms=0,
        keep_on_disconnect=False,
        router=Incarnation("r"),
    )
    record = first_record(new)

    def text() -> TextStream:
        return TextStream.of_branch(ByteTokenizer().detokenizer(), PARAMS, ())

    return Delivery(record, PARAMS, text, Start(fresh=True)), Snapshot(record, PROMPT, ((), ()), 0)


def test_the_score_at_a_stop_string_outlives_what_the_journal_says_of_the_branch_s_end():
    """The worker went on until it was told; its score is of more than the client has."""
    delivery, snapshot = ranked_delivery()
    for index, (token, score) in enumerate([(ord("a"), -1.0), (ord("q"), -2.0), (ord("b"), -9.0)]):
        chain = extend_chain(prompt_chain(PROMPT), b"aqb"[: index + 1])
        assert delivery.take(0, index, [token], chain, FinishReason.NONE, (), score)
    snapshot.record.finishes = (FinishReason.LENGTH, FinishReason.LENGTH)
    snapshot.record.scores = (-9.0, -4.0)
    delivery.feed(Snapshot(snapshot.record, PROMPT, ((), tuple(b"xyz")), 0), delivery.next_indexes)
    assert delivery.ended
    assert delivery.stopped() == [(0, 2, -2.0)]
    assert delivery.returned_scores() == [-2.0]
    assert [tuple(piece.token_ids) for _, piece, _ in delivery.shown()] == [tuple(b"aq")]
