"""Items that wait become fewer, and say the same."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from octavo.request.errors import BadLogits
from octavo.request.ids import SequenceId
from octavo.request.sampling import FinishReason, TokenScore
from octavo.request.step_item import StepItem, WaitingItems

BRANCHES = [(SequenceId(seq_id), branch) for seq_id in "ab" for branch in (0, 1)]


def item(index, tokens, seq_id="a", branch=0, **fields):
    return StepItem(SequenceId(seq_id), fields.pop("epoch", 1), branch, index, tokens, chain=sum(tokens), **fields)


@st.composite
def arrivals(draw):
    """Runs of four branches in any order; some are repeated, leave a gap, come with scores, or begin a new epoch."""
    items, places = [], dict.fromkeys(BRANCHES, 0)
    for seq_id, branch in draw(st.lists(st.sampled_from(BRANCHES), max_size=30)):
        index = max(0, places[seq_id, branch] + draw(st.sampled_from((0, 0, 0, 0, -1, 1))))
        tokens = draw(st.lists(st.integers(0, 9), max_size=3))
        made = item(index, tokens, seq_id, branch, epoch=draw(st.sampled_from((1, 1, 1, 2))))
        if draw(st.booleans()):
            made.scores = [TokenScore(token, -1.0) for token in tokens]
        if draw(st.integers(0, 9)) == 0:
            made.finish, made.failure = FinishReason.ERROR, BadLogits("x").failure()
        places[seq_id, branch] = made.end
        items.append(made)
    return items


def told(items):
    """What the items tell of each branch, token by token, in their order."""
    seen: dict[object, list[object]] = {}
    for each in items:
        heard = seen.setdefault((each.seq_id, each.branch), [])
        scores = list(each.scores) or [None] * len(each.token_ids)
        indexes = range(each.first_index, each.end)
        heard += zip([each.epoch] * len(indexes), indexes, each.token_ids, scores, strict=True)
        if each.finish:
            heard.append((each.end, each.finish, each.failure))
    return seen


@given(arrivals())
def test_waiting_items_say_what_the_given_ones_said(items):
    before, waiting = deepcopy(items), WaitingItems(items)
    assert waiting.num_tokens == sum(len(each.token_ids) for each in items)
    taken = waiting.take_items()
    assert told(taken) == told(items)
    assert items == before, "the given items were changed"
    chains = {(each.seq_id, each.branch, each.epoch): each.chain for each in items}
    assert {(each.seq_id, each.branch, each.epoch): each.chain for each in taken} == chains
    assert (len(waiting), waiting.num_tokens, waiting.take_items()) == (0, 0, [])


def test_a_run_becomes_one_item_and_what_was_taken_is_not_continued():
    waiting = WaitingItems(item(index, [index]) for index in range(5))
    first = waiting.take_items()
    assert [(each.first_index, each.token_ids, each.chain) for each in first] == [(0, [0, 1, 2, 3, 4], 4)]
    waiting.add(item(5, [5]))
    assert [each.first_index for each in waiting.take_items()] == [5]
    assert first[0].token_ids == [0, 1, 2, 3, 4]
    # Items stay apart where one would say less.
    ranked = [item(i, [i], cumulative_logprob=-float(i)) for i in range(3)]
    replayed = [item(0, [1]), item(1, [2], cached_tokens=7)]
    for items in (ranked, replayed):
        assert WaitingItems(items).take_items() == items
