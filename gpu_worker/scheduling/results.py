"""What the scheduler answers: whether it takes a sequence, what a step brought, how loaded it is."""

from dataclasses import dataclass, field
from enum import Enum

from gpu_worker.scheduling.sequence import Sequence
from gpu_worker.scheduling.step import TokenScore
from octavo.sampling import FinishReason


class Outcome(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Admission:
    """OK: it is in the waiting queue. LATER: the queue is full. NEVER: it cannot fit; the message has the numbers."""

    outcome: Outcome
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def never(self) -> bool:
        return self.outcome is Outcome.NEVER


@dataclass(slots=True, eq=False)
class Delta:
    """New tokens of one branch of the record, and its end if it has ended."""

    sequence: Sequence
    branch_index: int
    first_index: int  # of token_ids in the branch's output
    token_ids: tuple[int, ...]
    finish: FinishReason = FinishReason.NONE
    failure: str = ""  # JSON of octavo.errors.Failure, with FinishReason.ERROR
    scores: tuple[TokenScore, ...] = ()  # one per token, if log probabilities are asked for
    prompt_scores: tuple[TokenScore, ...] = ()  # of prompt[1:], with branch 0's first delta, if asked for
    cumulative_logprob: float | None = None  # where branches are ranked
    cached_tokens: int | None = None  # with the sequence's first delta


@dataclass(slots=True, eq=False)
class StepResult:
    """What a step brought, in the order it happened."""

    step_id: int
    deltas: list[Delta] = field(default_factory=list)
    num_branches: int = 0
    num_tokens: int = 0
    granted_by: object = None  # whose finite grant it used up


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the scheduler is now; fields as in octavo.v1.Load."""

    num_running: int  # branches
    num_waiting: int
    num_swapped: int
    num_sequences: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_free_host_blocks: int
    num_prefill_tokens: int
    num_preempted_swap: int
    num_preempted_recompute: int
