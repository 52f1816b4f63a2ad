"""Makes items: of new tokens of a branch, of the end of a beam search, and of what is known of the prompt."""

import sys

from gpu_worker.scheduling.state.place import Hold
from gpu_worker.scheduling.state.sequence import Branch, Sequence
from octavo.request.errors import Failure
from octavo.request.sampling import FinishReason
from octavo.request.step_item import StepItem


def branch_item(
    branch: Branch,
    token_ids: tuple[int, ...],
    finish: FinishReason = FinishReason.NONE,
    failure: Failure | None = None,
) -> StepItem:
    """The item of a branch to which `token_ids` have just been appended.

    The first item of a replayed branch repeats the journalled tokens, if clients get scores that no journal has.
    """
    sequence = branch.sequence
    item = new_item(sequence, branch.index, branch.num_output - len(token_ids), token_ids, finish, failure)
    if branch.num_to_repeat:
        item.first_index, item.token_ids = 0, tuple(branch.output)
        if len(branch.repeated_scores) == branch.num_to_repeat:
            item.scores = tuple(branch.repeated_scores)
        branch.num_to_repeat, branch.repeated_scores = 0, []
    if sequence.params.ranked and branch.first_unscored == sys.maxsize:  # else a replay has not scored all tokens yet
        item.cumulative_logprob = branch.cumulative_logprob
    _add_prompt_facts(sequence, item)
    return item


def new_item(
    sequence: Sequence,
    branch: int,
    first_index: int,
    token_ids: tuple[int, ...],
    finish: FinishReason,
    failure: Failure | None,
) -> StepItem:
    return StepItem(sequence.seq_id, sequence.epoch, branch, first_index, token_ids, 0, finish, failure)


def beam_items(sequence: Sequence, reason: FinishReason, failure: Failure | None = None) -> list[StepItem]:
    """The last items of a beam search: its best hypotheses.

    A `reason` other than NONE ends the search early: its live beams are hypotheses, too. A `failure` leaves it none.
    """
    search = sequence.search
    if search is None:
        return []
    if failure:
        search.complete.clear()
    elif reason is not FinishReason.NONE:
        for branch in sequence.branches:
            search.keep_live(tuple(branch.output), branch.cumulative_logprob, tuple(branch.scores or ()))
    items = []
    for index, (start, done) in enumerate(zip(search.starts, search.done, strict=True)):
        if done:
            continue
        best = search.complete[index] if index < len(search.complete) else None
        tokens = best.token_ids[start:] if best else ()
        finish = reason or (best.finish if best else FinishReason.STOP)
        item = new_item(sequence, index, start, tokens, finish, failure)
        if best:
            item.cumulative_logprob, item.scores = best.total, best.scores[start:]
        _add_prompt_facts(sequence, item)
        items.append(item)
    return items


def _add_prompt_facts(sequence: Sequence, item: StepItem) -> None:
    """Adds to the sequence's first item its cached tokens, and to branch 0's first item the scores of the prompt."""
    if Hold.UNREPORTED in sequence.holds:
        sequence.holds.discard(Hold.UNREPORTED)
        item.cached_tokens = sequence.cached_tokens or 0
    if item.branch == 0 and len(sequence.prompt_scores) == len(sequence.prompt) - 1:
        item.prompt_scores, sequence.prompt_scores = tuple(sequence.prompt_scores), []
