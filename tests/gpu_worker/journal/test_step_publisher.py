"""Who is told what: following from an index, observers, counted steps, streams that replace each other."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from sequences import item_of, new_sequence

from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.journal.step_subscription import (
    MAX_JOINED_ITEMS,
    MAX_JOINED_MESSAGES,
    MAX_PENDING_MESSAGES,
    MovedSequence,
    StepMessage,
    StepSubscription,
)
from gpu_worker.scheduling.state.step import StepItems
from octavo.request.errors import HistoryLost
from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore
from octavo.request.step_item import StepItem

SEQ = SequenceId("s")


def reader(publisher: StepPublisher, router: str = "") -> StepSubscription:
    """The stream of this router; without a name, of an observer."""
    subscription = StepSubscription()
    publisher.add_subscription(subscription)
    if router:
        publisher.assign_router(subscription, router)
    else:
        publisher.add_observer(subscription)
    return subscription


def begin(
    publisher: StepPublisher,
    router: str = "",
    outputs: list[list[int]] | None = None,
    params: SamplingParams | None = None,
):
    params = params or SamplingParams(max_tokens=99, seed=1)
    sequence = new_sequence(SEQ, [1], params)
    publisher.open_log(sequence, prompt_chain([1]), outputs or [[]], (), router)
    return publisher.logs[SEQ]


def accept(publisher: StepPublisher, first: int, tokens: list[int], step_id: int = 1) -> None:
    entry = publisher.logs[SEQ]
    item = item_of(entry.sequence, 0, first, tuple(tokens))
    publisher.publish_item(entry, item)
    publisher.flush(StepItems(step_id, [item], 1, 1))


def drain(subscription: StepSubscription, tokens: list[int] | None = None) -> list[int]:
    """The tokens a reader has after dropping duplicates by index, who had some before."""
    tokens = tokens or []
    for step in subscription.ready:
        for item in step.items:
            assert item.first_index <= len(tokens), "a gap"
            tokens.extend(item.token_ids[len(tokens) - item.first_index :])
            assert item.chain == extend_chain(prompt_chain([1]), tokens[: item.first_index + len(item.token_ids)])
    return tokens


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_following_at_any_time_from_any_index_loses_nothing(tokens, when, start):
    publisher = StepPublisher()
    subscription = reader(publisher, "late")
    begin(publisher)
    start = min(start, when, len(tokens))
    for index, token in enumerate(tokens):
        if index == when:
            publisher.follow(subscription, SEQ, [start])
        accept(publisher, index, [token], index)
    if when >= len(tokens):
        publisher.follow(subscription, SEQ, [start])
    assert drain(subscription, tokens[:start]) == tokens


def test_where_branches_compete_a_late_follower_learns_the_score_at_every_token():
    publisher = StepPublisher()
    subscription = reader(publisher, "late")
    entry = begin(publisher, outputs=[[7, 8], [7]], params=SamplingParams(max_tokens=99, seed=1, best_of=2))
    for index, total in ((2, -1.5), (3, -2.0), (4, -4.0)):
        item = item_of(entry.sequence, 0, index, (index,), cumulative_logprob=total)
        publisher.publish_item(entry, item)
        publisher.flush(StepItems(index, [item], 1, 1))
    publisher.follow(subscription, SEQ, [3, 0])
    (step,) = subscription.ready
    told = [(item.branch, item.first_index, list(item.token_ids), item.cumulative_logprob) for item in step.items]
    assert told == [(0, 3, [3], -2.0), (0, 4, [4], -4.0), (1, 0, [7], None)]
    assert step.items[0].chain == extend_chain(prompt_chain([1]), [7, 8, 2, 3])


def test_a_slow_reader_is_cut_off_alone():
    publisher = StepPublisher()
    slow, observer, fast = (reader(publisher, router) for router in ("slow", "", "fast"))
    begin(publisher, "slow")
    publisher.follow(fast, SEQ, [0])
    seen: list[int] = []
    for index in range(MAX_PENDING_MESSAGES + 100):
        accept(publisher, index, [index], index)
        seen += [token for item in fast.ready.popleft().items for token in item.token_ids]
    assert [each.overflowed for each in (slow, observer, fast)] == [True, True, False]
    assert seen == list(range(MAX_PENDING_MESSAGES + 100))
    assert not (slow.ready or observer.ready or publisher._observers)
    assert set(publisher.logs[SEQ].followers) == set(publisher.subscriptions.values()) == {fast}


# Several steps sent together


def finish(publisher: StepPublisher, first: int, step_id: int) -> None:
    entry = publisher.logs[SEQ]
    item = item_of(entry.sequence, 0, first, (9,), finish=FinishReason.LENGTH)
    publisher.publish_item(entry, item)
    publisher.flush(StepItems(step_id, [item], 1, 1))


def messages(subscription: StepSubscription) -> list[list[int]]:
    return [[token for item in step.items for token in item.token_ids] for step in subscription.ready]


async def test_an_interval_delays_neither_first_tokens_nor_ends():
    publisher = StepPublisher(interval=100)
    subscription = reader(publisher)
    entry = begin(publisher)
    first = item_of(entry.sequence, 0, 0, (5,), cached_tokens=0)
    publisher.publish_item(entry, first)
    publisher.flush(StepItems(1, [first], 1, 1))
    assert messages(subscription) == [[5]]
    accept(publisher, 1, [6], 2)
    accept(publisher, 2, [7], 3)
    assert len(subscription.ready) == 1
    finish(publisher, 3, 4)
    assert messages(subscription) == [[5], [6, 7, 9]]
    assert subscription.ready[1].items[0].finish is FinishReason.LENGTH
    assert drain(subscription) == [5, 6, 7, 9]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=30))
def test_joined_items_say_the_same_as_those_they_are_made_of(interval, runs):
    """Any mixture of three branches, sent at any interval: each branch's tokens, in order, with the right chain."""

    async def scenario() -> None:
        publisher = StepPublisher(interval)
        subscription = reader(publisher)
        entry = begin(publisher, outputs=[[], [], []])
        told: list[list[int]] = [[], [], []]
        for step_id, (branch, count) in enumerate(runs, 1):
            tokens = tuple(range(len(told[branch]), len(told[branch]) + count))
            item = item_of(entry.sequence, branch, len(told[branch]), tokens)
            publisher.publish_item(entry, item)
            publisher.flush(StepItems(step_id, [item], 1, 1))
            told[branch] += tokens
        publisher._flush_late()
        got: list[list[int]] = [[], [], []]
        for item in (item for step in subscription.ready for item in step.items):
            assert item.first_index == len(got[item.branch])
            got[item.branch] += item.token_ids
            assert item.chain == extend_chain(prompt_chain([1]), got[item.branch])
        assert got == told

    asyncio.run(scenario())


# What stays behind


def test_nothing_is_left_of_a_thousand_sequences():
    publisher = StepPublisher()
    observer, router = reader(publisher), reader(publisher, "r1")
    for number in range(1000):
        begin(publisher, "r1")
        match number % 4:
            case 0:
                finish(publisher, 0, number)
            case 1:
                publisher.end_branch(publisher.logs[SEQ], 0)
            case 2:
                publisher.publish_failure(publisher.logs[SEQ], HistoryLost("lost").failure())
                publisher.flush(StepItems(number))
            case 3:
                publisher.forget_log(publisher.logs[SEQ])
        for subscription in (observer, router):
            subscription.ready.clear()
    assert not publisher.logs
    assert not observer.buffer
    assert not router.buffer
    for subscription in (observer, router):
        publisher.remove_subscription(subscription)
    assert not (publisher.subscriptions or publisher._observers or publisher._routers)


def test_steps_that_wait_for_a_router_travel_together_and_nothing_passes_what_must_be_heard_in_order():
    publisher = StepPublisher()
    router = reader(publisher, "r")
    begin(publisher, "r")
    for index in range(4):
        accept(publisher, index, [index], 10 + index)
    publisher.publish_moved(SEQ, 2, Incarnation("other"))
    publisher.follow(router, SequenceId("elsewhere"), [0])
    first, moved, unknown = (router.next_message() for _ in range(3))
    assert [(item.first_index, list(item.token_ids)) for item in first.items] == [(0, [0, 1, 2, 3])]
    assert (first.step_id, first.num_branches, first.moved, first.unknown) == (13, 1, [], [])
    assert [each.seq_id for each in moved.moved] == [SEQ]
    assert unknown.unknown == ["elsewhere"]
    assert not router.ready


def test_a_joined_message_has_a_limit():
    def sizes(messages: list[StepMessage]) -> list[int]:
        """The items of each message that a router gets when all of these wait."""
        router = StepSubscription(router_id="r")
        for each in messages:
            router.queue_message(each)
        return [len(router.next_message().items) for _ in iter(lambda: bool(router.ready), False)]

    def message(size: int, number: int, **fields: object) -> StepMessage:
        ids = [SequenceId(f"{number}-{at}") for at in range(size)]
        return StepMessage(1, [StepItem(seq_id, 1, 0, 0, [1], 1, **fields) for seq_id in ids])

    quarter = MAX_JOINED_ITEMS // 4
    assert sizes([message(quarter, number) for number in range(9)]) == [4 * quarter, 4 * quarter, quarter]
    small = [message(1, number) for number in range(MAX_JOINED_MESSAGES + 3)]
    assert sizes(small) == [MAX_JOINED_MESSAGES, 3]
    scored = message(1, 0, prompt_scores=[TokenScore(1, -1.0)])
    assert sizes([message(1, 1), scored, message(1, 2), message(1, 3)]) == [1, 1, 2]


# Sequences that move to another worker

MOVED = MovedSequence(SEQ, 2, Incarnation("b"))


async def test_whoever_follows_is_told_of_a_move_after_the_last_items():
    publisher = StepPublisher(interval=100)
    follower, observer, other = (reader(publisher, router) for router in ("r", "", "other"))
    sequence_log = begin(publisher, "r")
    accept(publisher, 0, [5], 1)
    assert not follower.ready
    publisher.publish_moved(SEQ, 2, Incarnation("b"))
    for subscription in (follower, observer):
        assert [(len(each.items), each.moved) for each in subscription.ready] == [(1, []), (0, [MOVED])]
    assert not other.ready
    assert sequence_log.gone
    assert not publisher.logs


def test_a_late_follower_is_told_of_a_move_until_the_sequence_is_back():
    publisher, subscription = StepPublisher(), StepSubscription()
    begin(publisher)
    publisher.publish_moved(SEQ, 2, Incarnation("b"))
    assert publisher.known_epoch(SEQ) == 2  # an admission at epoch 1 comes too late
    publisher.follow(subscription, SEQ, [])
    # Both: where it went may be old news for a reader who knows that it is on its way back.
    assert [(each.moved, each.unknown) for each in subscription.ready] == [([MOVED], [SEQ])]
    back = new_sequence(SEQ, [1], SamplingParams(max_tokens=99, seed=1), epoch=3)
    publisher.open_log(back, prompt_chain([1]), [[7]], (), "")
    publisher.publish_moved(SEQ, 2, Incarnation("b"))  # late
    assert SEQ in publisher.logs
    subscription.ready.clear()
    publisher.follow(subscription, SEQ, [])
    assert [len(each.items) for each in subscription.ready] == [1]
