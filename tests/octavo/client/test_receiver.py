from ast import literal_eval

import pytest
from effort import draws
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.client.events import Event, StreamEnd
from octavo.client.receiver import BrokenStreamError, StreamReceiver
from octavo.request.sampling import FinishReason

# The oracle: token i of branch b has this text. Lengths differ, some are empty, none is like its neighbour.


def words(branch, length):
    return [f"{branch}.{index}," * (index % 3) for index in range(length)]


def router_stream(lengths, place, chunks, lag, now=0):
    """What a router sends from `place` on, {branch: (index, chars)}; text lags `lag` tokens behind its tokens."""
    place = dict(place)
    left = list(range(len(lengths)))
    turn = 0
    while left:
        branch = left[turn % len(left)]
        index, chars = place[branch]
        count = min(chunks[turn % len(chunks)], lengths[branch] - index)
        turn += 1
        end = index + count
        ended = end == lengths[branch]
        text = "".join(words(branch, lengths[branch])[: end if ended else max(end - lag, 0)])
        place[branch] = (end, max(len(text), chars))
        if ended:
            left.remove(branch)
        yield Event(
            request_id="r",
            branch=branch,
            first_index=index,
            token_ids=tuple(range(1000 * branch + index, 1000 * branch + end)),
            text=text[chars:],
            finish_reason=FinishReason.LENGTH if ended else FinishReason.NONE,
            finished=None if left else StreamEnd(),
            resume_token=repr((now, sorted(place.items()))).encode(),
        )


FAULTS = st.sampled_from(["cut", "skip", "twice", "swap", "old"])
CONNECTION = st.tuples(
    st.lists(st.tuples(st.integers(0, 12), FAULTS), max_size=3),
    st.sampled_from(["token", "start", "indexes"]),  # where it begins, if there is a token
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)


def disturbed(events, faults):
    for position, fault in faults:
        if position >= len(events):
            continue
        if fault == "cut":
            events = events[:position]
        elif fault == "skip":
            events = events[:position] + events[position + 1 :]
        elif fault == "twice":
            events = events[: position + 1] + events[position:]
        elif fault == "swap":
            events = events[:position] + events[position : position + 2][::-1] + events[position + 2 :]
        elif fault == "old":
            events = events[:position] + events[: position // 2] + events[position:]
    return events


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    lag=st.integers(0, 3),
    connections=st.lists(CONNECTION, max_size=6),
)
@settings(max_examples=draws(60, 300))
@example(lengths=[1, 1, 1], lag=0, connections=[([(0, "skip"), (1, "cut")], "token", [1])])
@example(lengths=[2, 4], lag=1, connections=[([(2, "cut")], "token", [3]), ([], "indexes", [1])])
def test_everything_is_delivered_exactly_once_whatever_connections_do(lengths, lag, connections):
    receiver = StreamReceiver(num_branches=len(lengths))
    tokens = [[] for _ in lengths]
    texts = ["" for _ in lengths]
    finishes = []
    # Two good connections in the end: a lost end of a branch may show only at the end of the first.
    last = ([], "token", [2])
    for now, (faults, begins_at, chunks) in enumerate([*connections, last, last]):
        place = dict.fromkeys(range(len(lengths)), (0, 0))
        if receiver.resume_token and begins_at != "start":
            if begins_at == "indexes":  # the last text of a branch that has ended comes again
                for branch, index in enumerate(receiver.next_indexes()):
                    place[branch] = (index, len("".join(words(branch, index)[: max(index - lag, 0)])))
            else:
                place = dict(literal_eval(receiver.resume_token.decode())[1])
            receiver.resume()
        else:
            receiver.restart()
        for event in disturbed(list(router_stream(lengths, place, chunks, lag, now)), faults):
            try:
                new = receiver.accept(event)
            except BrokenStreamError:
                break
            if new is None:
                continue
            assert new.first_index == len(tokens[new.branch])
            tokens[new.branch] += new.token_ids
            texts[new.branch] += new.text
            finishes += [new.branch] * bool(new.finish_reason)
        if receiver.done:
            break
    assert tokens == [list(range(1000 * branch, 1000 * branch + length)) for branch, length in enumerate(lengths)]
    assert texts == ["".join(words(branch, length)) for branch, length in enumerate(lengths)]
    assert sorted(finishes) == list(range(len(lengths)))


def event(first_index, *token_ids, **rest):
    return Event(request_id="r", first_index=first_index, token_ids=token_ids, **rest)


def test_repeated_prompt_logprobs_are_dropped_by_position():
    receiver = StreamReceiver()
    a, b, c = object(), object(), object()
    assert receiver.accept(event(0, prompt_logprobs=(a,), first_prompt_position=1)).prompt_logprobs == (a,)
    receiver.resume()
    assert receiver.accept(event(0, prompt_logprobs=(a,), first_prompt_position=1)) is None
    new = receiver.accept(event(0, prompt_logprobs=(a, b, c), first_prompt_position=1))
    assert (new.first_prompt_position, new.prompt_logprobs) == (2, (b, c))
    with pytest.raises(BrokenStreamError):
        receiver.accept(event(0, prompt_logprobs=(a,), first_prompt_position=5))


def test_the_first_event_tells_an_unknown_start():
    receiver = StreamReceiver(None)
    assert receiver.accept(event(5, 1)).first_index == 5
    with pytest.raises(BrokenStreamError):
        receiver.accept(event(7, 1))
