"""Who is told what: following from an index, observers, counted steps, streams that replace each other."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.scheduling.sequence import Sequence
from gpu_worker.scheduling.step import Delta, StepResult
from gpu_worker.serving.step_stream import MAX_PENDING_STEPS, Item, Stream, joined
from gpu_worker.serving.streams import MAX_STEP_ITEMS, Streams
from octavo.hashing import extend_chain, prompt_chain
from octavo.ids import SequenceId
from octavo.sampling import FinishReason, SamplingParams

SEQ = SequenceId("s")


def begin(
    streams: Streams,
    router: str = "",
    outputs: list[list[int]] | None = None,
    params: SamplingParams | None = None,
):
    params = params or SamplingParams(max_tokens=99, seed=1)
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


def test_where_branches_compete_a_late_follower_learns_the_score_at_every_token():
    streams, stream = Streams(), Stream()
    streams.attach(stream)
    streams.name(stream, "late")
    entry = begin(streams, outputs=[[7, 8], [7]], params=SamplingParams(max_tokens=99, seed=1, best_of=2))
    for index, total in ((2, -1.5), (3, -2.0), (4, -4.0)):
        delta = Delta(entry.sequence, 0, index, (index,), cumulative_logprob=total)
        streams.accept(entry, delta)
        streams.flush(StepResult(index, [delta], 1, 1))
    streams.follow(stream, SEQ, [3, 0])
    (step,) = stream.ready
    told = [(item.branch, item.first_index, list(item.token_ids), item.cumulative_logprob) for item in step.items]
    assert told == [(0, 3, [3], -2.0), (0, 4, [4], -4.0), (1, 0, [7], None)]
    assert step.items[0].chain == extend_chain(prompt_chain([1]), [7, 8, 2, 3])


def test_what_a_late_follower_has_missed_comes_in_pieces():
    streams, stream, count = Streams(), Stream(), 2 * MAX_STEP_ITEMS + 1
    streams.attach(stream)
    entry = begin(streams, params=SamplingParams(max_tokens=9999, seed=1, best_of=2), outputs=[[], []])
    for index in range(count):
        streams.accept(entry, Delta(entry.sequence, 0, index, (index,), cumulative_logprob=-1.0 * index))
    streams.follow(stream, SEQ, [0, 0])
    assert [len(step.items) for step in stream.ready] == [MAX_STEP_ITEMS, MAX_STEP_ITEMS, 1]
    assert drain(stream) == list(range(count))


def test_an_observer_sees_everything_and_a_router_only_what_it_follows():
    streams, observer, router = Streams(), Stream(), Stream()
    for stream in (observer, router):
        streams.attach(stream)
        streams.observe(stream)
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
    streams.observe(stream)
    begin(streams)
    for index in range(MAX_PENDING_STEPS + 5):
        accept(streams, index, [1], index)
    assert stream.overflowed
    assert not stream.ready
    assert not (streams.open_streams or streams._observers or streams.logs[SEQ].followers)


@pytest.mark.parametrize("outputs", [[[]], [[7, 8]], [[7], [9]]])
def test_a_replayed_sequence_begins_where_its_journal_ends(outputs):
    streams, stream = Streams(), Stream()
    streams.attach(stream)
    streams.name(stream, "r1")
    entry = begin(streams, "r1", outputs)
    assert [branch.chain for branch in entry.branches] == [extend_chain(prompt_chain([1]), out) for out in outputs]
    accept(streams, len(outputs[0]), [3])
    assert [item.first_index for item in stream.ready[0].items] == [len(outputs[0])]


def test_a_stream_is_told_of_nothing_before_its_first_command():
    streams, stream = Streams(), Stream()
    streams.attach(stream)
    begin(streams)
    accept(streams, 0, [4])
    streams.name(stream, "r1")
    streams.observe(stream)  # a router's never observes
    accept(streams, 1, [5], 2)
    assert not stream.ready


# Several steps sent together


def finish(streams: Streams, first: int, step_id: int) -> None:
    entry = streams.logs[SEQ]
    delta = Delta(entry.sequence, 0, first, (9,), FinishReason.LENGTH)
    streams.accept(entry, delta)
    streams.flush(StepResult(step_id, [delta], 1, 1))


def messages(stream: Stream) -> list[list[int]]:
    return [[token for item in step.items for token in item.token_ids] for step in stream.ready]


async def test_an_interval_sends_the_tokens_of_several_steps_as_one_item():
    streams, stream = Streams(interval=3), Stream()
    streams.attach(stream)
    streams.observe(stream)
    begin(streams)
    for index in range(6):
        accept(streams, index, [index], index + 1)
    assert messages(stream) == [[0, 1, 2], [3, 4, 5]]
    assert [len(step.items) for step in stream.ready] == [1, 1]
    assert drain(stream) == list(range(6))


async def test_an_interval_delays_neither_first_tokens_nor_ends():
    streams, stream = Streams(interval=100), Stream()
    streams.attach(stream)
    streams.observe(stream)
    entry = begin(streams)
    first = Delta(entry.sequence, 0, 0, (5,), cached_tokens=0)
    streams.accept(entry, first)
    streams.flush(StepResult(1, [first], 1, 1))
    assert messages(stream) == [[5]]
    accept(streams, 1, [6], 2)
    accept(streams, 2, [7], 3)
    assert len(stream.ready) == 1
    finish(streams, 3, 4)
    assert messages(stream) == [[5], [6, 7, 9]]
    assert stream.ready[1].items[0].finish is FinishReason.LENGTH
    assert drain(stream) == [5, 6, 7, 9]


async def test_withheld_tokens_go_when_no_further_step_comes():
    streams, stream = Streams(interval=100), Stream()
    streams.attach(stream)
    streams.observe(stream)
    begin(streams)
    accept(streams, 0, [5], 1)
    assert not stream.ready
    async with asyncio.timeout(10):
        await stream.wake.wait()
    assert drain(stream) == [5]


async def test_a_counted_step_is_sent_at_once_whatever_the_interval():
    streams, stream = Streams(interval=100), Stream(num_awaited=1)
    streams.attach(stream)
    streams.observe(stream)
    begin(streams)
    accept(streams, 0, [5], 1)
    entry = streams.logs[SEQ]
    delta = Delta(entry.sequence, 0, 1, (6,))
    streams.accept(entry, delta)
    streams.flush(StepResult(2, [delta], 1, 1, granted_by=stream))
    assert messages(stream) == [[5, 6]]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=30))
def test_joined_items_say_the_same_as_those_they_are_made_of(interval, runs):
    """Any mixture of three branches, sent at any interval: each branch's tokens, in order, with the right chain."""

    async def scenario() -> None:
        streams, stream = Streams(interval), Stream()
        streams.attach(stream)
        streams.observe(stream)
        entry = begin(streams, outputs=[[], [], []])
        told: list[list[int]] = [[], [], []]
        for step_id, (branch, count) in enumerate(runs, 1):
            tokens = tuple(range(len(told[branch]), len(told[branch]) + count))
            delta = Delta(entry.sequence, branch, len(told[branch]), tokens)
            streams.accept(entry, delta)
            streams.flush(StepResult(step_id, [delta], 1, 1))
            told[branch] += tokens
        streams._flush_late()
        got: list[list[int]] = [[], [], []]
        for item in (item for step in stream.ready for item in step.items):
            assert item.first_index == len(got[item.branch])
            got[item.branch] += item.token_ids
            assert item.chain == extend_chain(prompt_chain([1]), got[item.branch])
        assert got == told

    asyncio.run(scenario())


# What stays behind


def test_nothing_is_left_of_ten_thousand_sequences():
    streams, observer, router = Streams(), Stream(), Stream()
    streams.attach(observer)
    streams.observe(observer)
    streams.attach(router)
    streams.name(router, "r1")
    for number in range(10_000):
        begin(streams, "r1")
        match number % 4:
            case 0:
                finish(streams, 0, number)
            case 1:
                streams.end_branch(streams.logs[SEQ], 0)
            case 2:
                streams.fail(streams.logs[SEQ], "{}")
                streams.flush(StepResult(number))
            case 3:
                streams.forget(streams.logs[SEQ])
        for stream in (observer, router):
            stream.ready.clear()
    assert not streams.logs
    assert not observer.buffer
    assert not router.buffer
    for stream in (observer, router):
        streams.detach(stream)
    assert not (streams.open_streams or streams._observers or streams._routers)


def test_a_sequence_that_had_ended_before_it_came_leaves_no_log():
    streams = Streams()
    params = SamplingParams(max_tokens=99, seed=1)
    sequence = Sequence.from_admission(seq_id=SEQ, epoch=1, prompt=[1], params=params, root=b"r")
    streams.begin(sequence, prompt_chain([1]), [[5]], (0,), "")
    assert not streams.logs


def test_a_slow_follower_is_cut_off_and_others_miss_nothing():
    streams, slow, fast = Streams(), Stream(), Stream()
    for stream, router in ((slow, "slow"), (fast, "fast")):
        streams.attach(stream)
        streams.name(stream, router)
    begin(streams, "slow")
    streams.follow(fast, SEQ, [0])
    seen: list[int] = []
    for index in range(MAX_PENDING_STEPS + 100):
        accept(streams, index, [index], index)
        seen += [token for item in fast.ready.popleft().items for token in item.token_ids]
    assert slow.overflowed
    assert not fast.overflowed
    assert seen == list(range(MAX_PENDING_STEPS + 100))


def test_a_stream_that_is_replaced_ends_though_it_awaits_steps():
    streams, first, second = Streams(), Stream(num_awaited=5), Stream()
    for stream in (first, second):
        streams.attach(stream)
        streams.name(stream, "r1")
    assert first.closing
    assert not first.num_awaited


def test_tokens_of_a_branch_that_competes_keep_their_scores():
    """A router's stop string may end the text at any of them; plain ones become one item."""
    ranked = [Item(SEQ, 1, 0, i, [i], i, cumulative_logprob=-float(i)) for i in range(3)]
    assert joined(ranked) == ranked
    plain = [Item(SEQ, 1, 0, i, [i], i) for i in range(3)]
    assert [item.token_ids for item in joined(plain)] == [[0, 1, 2]]
