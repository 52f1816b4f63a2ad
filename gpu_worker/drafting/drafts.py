"""What drafters make, and what those have in common that look something up."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu_worker.drafting.acceptance import Acceptance
from gpu_worker.steps.mask import Mask

FORCED, LOOKUP, RECENT, MODEL = "forced", "lookup", "recent", "model"
DRAFTERS = (FORCED, LOOKUP, RECENT, MODEL)


class Drafts(NamedTuple):
    """Guesses of the next tokens of a branch, one after another."""

    tokens: list[int]
    drafter: str = ""
    acceptance: Acceptance | None = None  # which learns what became of them
    masks: list[Mask] | None = None  # what a grammar allows after each, where that is known


class Lookup(Protocol):
    """What one branch keeps of a text in which its last tokens may stand."""

    @property
    def name(self) -> str:
        """One of DRAFTERS."""
        ...

    def find(self, tokens: Sequence[int]) -> int:
        """How many of the last tokens stand where the text went on; 0 if nowhere."""
        ...

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens from the place that `find` has found for the same tokens."""
        ...

    @property
    def acceptance(self) -> Acceptance:
        """Of drafts from matches as long as the last one."""
        ...
