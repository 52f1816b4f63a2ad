"""Makes deltas: of new tokens of a branch, of the end of a beam search, and of what is known of the prompt."""

import sys

from gpu_worker.scheduling.state.place import Hold
from gpu_worker.scheduling.state.sequence import Branch, Sequence
from gpu_worker.scheduling.state.step import Delta
from octavo.request.sampling import FinishReason


def branch_delta(
    branch: Branch, token_ids: tuple[int, ...], finish: FinishReason = FinishReason.NONE, failure: str = ""
) -> Delta:
    """The delta of a branch to which `token_ids` have just been appended.

    The first delta of a replayed branch repeats the journalled tokens, if clients get scores that no journal has.
    """
    sequence = branch.sequence
    delta = Delta(sequence, branch.index, branch.num_output - len(token_ids), token_ids, finish, failure)
    if branch.num_to_repeat:
        delta.first_index, delta.token_ids = 0, tuple(branch.output)
        if len(branch.repeated_scores) == branch.num_to_repeat:
            delta.scores = tuple(branch.repeated_scores)
        branch.num_to_repeat, branch.repeated_scores = 0, []
    if sequence.params.ranked and branch.first_unscored == sys.maxsize:  # else a replay has not scored all tokens yet
        delta.cumulative_logprob = branch.cumulative_logprob
    _add_prompt_facts(delta)
    return delta


def beam_deltas(sequence: Sequence, reason: FinishReason, failure: str = "") -> list[Delta]:
    """The last deltas of a beam search: its best hypotheses.

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
    deltas = []
    for index, (start, done) in enumerate(zip(search.starts, search.done, strict=True)):
        if done:
            continue
        best = search.complete[index] if index < len(search.complete) else None
        tokens = best.token_ids[start:] if best else ()
        finish = reason or (best.finish if best else FinishReason.STOP)
        delta = Delta(sequence, index, start, tokens, finish, failure)
        if best:
            delta.cumulative_logprob, delta.scores = best.total, best.scores[start:]
        _add_prompt_facts(delta)
        deltas.append(delta)
    return deltas


def _add_prompt_facts(delta: Delta) -> None:
    """Adds to the sequence's first delta its cached tokens, and to branch 0's first delta the scores of the prompt."""
    sequence = delta.sequence
    if Hold.UNREPORTED in sequence.holds:
        sequence.holds.discard(Hold.UNREPORTED)
        delta.cached_tokens = sequence.cached_tokens or 0
    if delta.branch_index == 0 and len(sequence.prompt_scores) == len(sequence.prompt) - 1:
        delta.prompt_scores, sequence.prompt_scores = tuple(sequence.prompt_scores), []
