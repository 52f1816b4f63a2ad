"""What the scheduler answers: whether it takes a sequence, what a step brought, how loaded it is."""

from dataclasses import dataclass
from enum import Enum


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
