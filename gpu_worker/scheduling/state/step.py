"""What a step runs (`StepPlan`), and what it adds to branches (`StepItems`)."""

import sys
from dataclasses import dataclass, field
from typing import Literal, NewType

from gpu_worker.drafting.acceptance import Acceptance
from gpu_worker.drafting.drafts import Drafts
from gpu_worker.scheduling.state.sequence import Branch, Hold, Sequence
from gpu_worker.steps.mask import Mask
from gpu_worker.steps.step_input import StepInput
from octavo.request.errors import Failure
from octavo.request.sampling import FinishReason
from octavo.request.step_item import StepItem


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens [start, start + length) of a branch, which this step runs; their slots are in branch.blocks.

    `samples` are the branches that get a next token from the chunk's last row: none for a part of a prompt, usually the
    branch itself, and all branches of a sequence when their common prompt is complete (they fork after the step).
    """

    branch: Branch
    start: int
    length: int
    samples: tuple[Branch, ...] = ()
    # Score positions [score_from, score_end) of the branch: the log probability of each token given those before it,
    # for prompt_logprobs and for cumulative_logprob after a replay. -1: none. Position p needs row p - 1, which is in
    # this chunk: score_from > start.
    score_from: int = -1
    # Of a decode that guesses: the tokens after its first one, with the mask of each if the branch has a grammar. Each
    # of its rows is a sample: `samples` is the branch again and again.
    drafts: tuple[int, ...] = ()
    draft_masks: tuple[Mask, ...] = ()
    drafter: str = ""  # which made the drafts
    acceptance: Acceptance | None = None  # which learns what became of them

    def add_drafts(self, drafts: Drafts, masks: list[Mask]) -> None:
        self.drafts, self.drafter, self.acceptance = tuple(drafts.tokens), drafts.drafter, drafts.acceptance
        self.draft_masks = tuple(masks)
        self.length = 1 + len(self.drafts)
        self.samples = (self.branch,) * self.length

    def end_drafts(self) -> None:
        """Makes it the decode of the next token."""
        self.start, self.length, self.samples = self.branch.num_computed, 1, (self.branch,)
        self.drafts = self.draft_masks = ()

    @property
    def score_end(self) -> int:
        """One past the last position to score: the chunk's last row scores the token after it, if that is known."""
        return min(self.start + self.length + 1, len(self.branch.tokens))


@dataclass(slots=True, eq=False)
class StepPlan:
    """A step as the scheduler sees it: `input` for the runner, and for its commit the branches in it (decodes first).

    The next plan uses the chunk objects of decodes again, so they are valid until the step's commit.
    """

    input: StepInput
    chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0
    num_branches: int = 0  # that sample: with num_drafts at most SchedulerConfig.max_batch_sequences
    num_decodes: int = 0  # leading chunks with length 1 and one sample, the branch itself
    num_drafted: int = 0  # chunks after these which are decodes with drafts
    num_drafts: int = 0  # tokens
    foresees: int = 0  # how many forced tokens after the next one are foreseen beside its masks


@dataclass(frozen=True, slots=True, eq=False)
class BeamProgress:
    """How many tokens the beams of a search have by now: none of them is in an item before the search ends."""

    sequence: Sequence
    num_tokens: int


SwapOperation = Literal["out", "in", "drop"]


@dataclass(frozen=True, slots=True)
class SwapAnswer:
    """What a swap on request did: the answer to one item of the call."""

    num_blocks: int  # of the sequence, which moved or were given back; 0 if they were there already
    num_bytes: int = 0  # copied: not what the prefix cache still had, nor what was dropped
    copy_s: float = 0.0  # how long the copies took


SubscriptionId = NewType("SubscriptionId", int)  # of one open Step stream, within this process


@dataclass(slots=True, eq=False)
class StepItems:
    """What a step that is over added to branches, in the order it happened. It is not the wire's `StepResult`."""

    step_id: int
    items: list[StepItem] = field(default_factory=list)
    num_branches: int = 0
    num_tokens: int = 0
    granted_by: SubscriptionId | None = None  # whose finite grant the step used up; None: an unlimited grant
    progress: list[BeamProgress] = field(default_factory=list)  # of searches, now and then


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
    told = sequence.params.ranked or (finish and sequence.params.summed)
    if told and branch.first_unscored == sys.maxsize:  # else a replay has not scored all tokens yet
        item.cumulative_logprob = branch.cumulative_logprob
    if finish:
        item.num_drafts, item.num_accepted_drafts = branch.num_drafts, branch.num_accepted_drafts
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
