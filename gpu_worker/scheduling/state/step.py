"""What a step runs (`StepPlan`), and what it adds to branches (`StepItems`)."""

from dataclasses import dataclass, field
from typing import Literal, NewType

from gpu_worker.scheduling.state.sequence import Branch, Sequence
from gpu_worker.steps.step_input import StepInput
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
    num_branches: int = 0  # rows that sample, at most SchedulerConfig.max_batch_sequences
    num_decodes: int = 0  # leading chunks with length 1 and one sample, the branch itself


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
