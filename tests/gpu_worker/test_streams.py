"""Who is told what: following from an index, observers, counted steps, streams that replace each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.results import Delta, StepResult
from gpu_worker.sequence import Sequence
from gpu_worker.streams import MAX_PENDING_STEPS, Stream, Streams
from octavo.hashing import extend_chain, prompt_chain
from octavo.ids import SequenceId
from octavo.sampling import SamplingParams

SEQ = SequenceId("s")


def begin(streams: Streams, router: str = "", outputs: list[list[int]] | None = None):
    params = SamplingParams(max_tokens=99, seed=1)
    sequence = Sequence.from_admission(seq_id=SEQ, epoch=1, prompt=[1], params=params, root=b"r")
    streams.begin(sequence, prompt_chain([1]), outputs or [[]], (), router)
    return streams.logs[SEQ]


def accept(streams: Streams, first: int, tokens: list[int], step_id: int = 1) -> None:
    entry = streams.logs[SEQ]
    delta = Delta(entry.sequence, 0, first, tuple(tokens))
    streams.accept(entry, delta)
    streams.flush(StepResult(step_id, [delta], 1, 1))


def drain(stream: Stream) -> list[int]:
    """The tokens a reader has after dropping duplicates by index."""
    tokens: list[int] = []
    for step in stream.ready:
        for item in step.items:
            assert item.first_index <= len(tokens), "a gap"
            tokens.extend(item.token_ids[len(tokens) - item.first_index :])
            assert item.chain == extend_chain(prompt_chain([1]), tokens[: item.first_index + len(item.token_ids)])
    return tokens


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_following_at_any_time_from_any_index_loses_nothing(tokens, when, start):
    streams, stream = Streams(), Stream()
    streams.attach(stream)
    streams.name(stream, "late")
    begin(streams)
    start = min(start, when, len(tokens))
    for index, token in enumerate(tokens):
        if index == when:
            streams.follow(stream, SEQ, [start])
        accept(streams, index, [token], index)
    if when >= len(tokens):
        streams.follow(stream, SEQ, [start])
    items = [item for step in stream.ready for item in step.items]
    got = tokens[:start]
    for item in items:
        assert item.first_index <= len(got)
        got.extend(item.token_ids[len(got) - item.first_index :])
    assert got == tokens


def test_an_observer_sees_everything_and_a_router_only_what_it_follows():
    streams, observer, router = Streams(), Stream(), Stream()
    for stream in (observer, router):
        streams.attach(stream)
    streams.name(router, "r1")
    begin(streams, router="other")
    accept(streams, 0, [4])
    assert drain(observer) == [4]
    assert not router.ready


def test_an_unknown_sequence_is_said_to_be_unknown():
    streams, stream = Streams(), Stream()
    streams.attach(stream)
    streams.follow(stream, SequenceId("nobody"), [])
    assert stream.ready[0].unknown == ["nobody"]


def test_counted_steps_are_reported_one_by_one_even_when_idle():
    streams, stream, other = Streams(), Stream(num_awaited=2), Stream(num_awaited=1)
    for each in (stream, other):
        streams.attach(each)
    for step_id, whose in enumerate((None, stream, other, stream, None), 1):
        streams.flush(StepResult(step_id, granted_by=whose))
    assert [step.step_id for step in stream.ready] == [2, 4]
    assert [step.step_id for step in other.ready] == [3]
    assert stream.num_awaited == other.num_awaited == 0


def test_a_second_stream_of_a_router_replaces_the_first():
    streams, first, second = Streams(), Stream(), Stream()
    for stream in (first, second):
        streams.attach(stream)
        streams.name(stream, "r1")
    assert first.closing
    streams.detach(first)
    begin(streams, router="r1")
    accept(streams, 0, [8])
    assert drain(second) == [8]


def test_a_reader_that_does_not_read_is_cut_off_and_bounded():
    streams, stream = Streams(), Stream()
    streams.attach(stream)
    begin(streams)
    for index in range(MAX_PENDING_STEPS + 5):
        accept(streams, index, [1], index)
    assert stream.overflowed
    assert len(stream.ready) == MAX_PENDING_STEPS


@pytest.mark.parametrize("outputs", [[[]], [[7, 8]], [[7], [9]]])
def test_a_replayed_sequence_begins_where_its_journal_ends(outputs):
    streams, stream = Streams(), Stream()
    streams.attach(stream)
    streams.name(stream, "r1")
    entry = begin(streams, "r1", outputs)
    assert [branch.chain for branch in entry.branches] == [extend_chain(prompt_chain([1]), out) for out in outputs]
    accept(streams, len(outputs[0]), [3])
    assert [item.first_index for item in stream.ready[0].items] == [len(outputs[0])]
