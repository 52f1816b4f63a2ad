"""The events of a stream carry what the delivery gives out, and each can be resumed from."""

import pytest
from accepted import accepted_sequence

from octavo.request.errors import BadLogits
from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.ids import SequenceId
from octavo.request.record import first_record
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore
from octavo.request.step_item import StepItem
from octavo.text.byte_tokenizer import ByteTokenizer
from octavo.text.stop import TextStream
from octavo.wire.public import failure_from_wire, finish_from_wire, score_from_wire
from router.streaming.delivery import Delivery
from router.streaming.event_encoder import EventEncoder
from router.streaming.resume_tokens import ResumeTokens, StreamPlace, StreamStart

PROMPT = (1, 2)
CHAIN = prompt_chain(PROMPT)
TOKENS = ResumeTokens(b"k" * 32)


class Stream:
    """The delivery and the encoder of one request with two branches."""

    def __init__(self) -> None:
        params = SamplingParams(seed=1, n=2, max_tokens=9)
        record = first_record(accepted_sequence(PROMPT, params))
        detokenizer = ByteTokenizer().detokenizer
        self.delivery = Delivery(
            record, params, lambda: TextStream.of_branch(detokenizer(), params, ()), StreamStart(fresh=True)
        )
        self.encoder = EventEncoder(record, self.delivery, TOKENS)

    def add(self, branch: int, output: bytes, finish: FinishReason = FinishReason.NONE, **fields: object) -> None:
        item = StepItem(SequenceId("s"), 1, branch, 0, list(output), extend_chain(CHAIN, output), finish, **fields)
        self.encoder.note_item(item)
        assert self.delivery.add_item(item)


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_each_event_has_the_places_of_all_branches_after_it(stream):
    stream.add(0, b"xyz")
    stream.add(1, b"a")
    first, second = stream.encoder.next_events()
    after_first, after_second = (TOKENS.read_token(event.resume_token) for event in (first, second))
    assert after_first.places == [StreamPlace(3, extend_chain(CHAIN, b"xyz"), 3), StreamPlace(0, CHAIN, 0)]
    assert after_second.places == [after_first.places[0], StreamPlace(1, extend_chain(CHAIN, b"a"), 1)]
    assert [(event.branch, event.text, list(event.token_ids)) for event in (first, second)] == [
        (0, "xyz", list(b"xyz")),
        (1, "a", list(b"a")),
    ]
    assert stream.encoder.next_events() == []


def test_scores_go_out_as_they_came_and_those_of_the_prompt_once(stream):
    score, prompt_score = TokenScore(ord("x"), -0.5, ((ord("x"), -0.5), (7, -1.5))), TokenScore(2, -0.25)
    stream.add(0, b"x", scores=[score], prompt_scores=[prompt_score])
    prompt_event, event = stream.encoder.next_events()
    assert [score_from_wire(message) for message in prompt_event.prompt_logprobs] == [prompt_score]
    assert (prompt_event.first_prompt_position, prompt_event.branch, prompt_event.first_index) == (1, 0, 0)
    assert not prompt_event.token_ids
    assert [score_from_wire(message) for message in event.logprobs] == [score]
    stream.add(0, b"xy")
    (event,) = stream.encoder.next_events()
    assert not event.logprobs
    assert not event.prompt_logprobs


def test_prompt_scores_span_events_and_a_client_that_leaves_between_them_loses_nothing(stream, monkeypatch):
    monkeypatch.setattr("router.streaming.event_encoder.MAX_PROMPT_SCORES", 2)
    scores = [TokenScore(i, -0.5) for i in range(5)]
    stream.add(0, b"x", prompt_scores=scores)
    *events, last = stream.encoder.next_events()
    assert [(event.first_prompt_position, len(event.prompt_logprobs)) for event in events] == [(1, 2), (3, 2), (5, 1)]
    sent = [score_from_wire(message) for event in events for message in event.prompt_logprobs]
    assert sent == scores
    for event in events:
        assert TOKENS.read_token(event.resume_token).places[0] == StreamPlace(0, CHAIN, 0)
    assert list(last.token_ids) == list(b"x")


def test_a_long_run_with_scores_comes_in_several_events(stream, monkeypatch):
    monkeypatch.setattr("router.streaming.delivery.MAX_RUN", 3)
    monkeypatch.setattr("router.streaming.delivery.MAX_JOINED", 1)
    output, scores = b"abcdefg", [TokenScore(i, -0.5) for i in b"abcdefg"]
    stream.add(0, output[:2], scores=scores[:2])
    stream.add(0, output, FinishReason.LENGTH, scores=scores)
    events = stream.encoder.next_events()
    assert [bytes(event.token_ids) for event in events] == [b"ab", b"c", b"def", b"g"]
    assert [score.chosen.token_id for event in events for score in event.logprobs] == list(output)
    assert [bool(event.finish_reason) for event in events] == [False, False, False, True]
    assert "".join(event.text for event in events) == output.decode()


def test_the_last_event_says_how_the_request_ended(stream):
    failure = BadLogits("no finite logit").failure()
    stream.add(0, b"xy", FinishReason.LENGTH, cached_tokens=1)
    (event,) = stream.encoder.next_events()
    assert not event.HasField("finished")
    stream.add(1, b"", FinishReason.ERROR, failure=failure)
    (event,) = stream.encoder.next_events()
    assert finish_from_wire(event.finish_reason) is FinishReason.ERROR
    assert failure_from_wire(event.finished.failure) == failure
    usage = event.finished.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (2, 2, 1)
