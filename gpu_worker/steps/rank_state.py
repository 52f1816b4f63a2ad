"""What is known of the ranks of a group: the processes that compute its steps together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank now. Rank 0 is the worker's own process."""

    rank: int
    host: str  # its name
    pid: int
    memory_bytes: int = 0  # that it has mapped and used, shared with others or not
    cpu_s: float = 0.0  # of processors, since its start
    waited_s: float = 0.0  # for other ranks, within steps
    silent_s: float = 0.0  # since it last said that it lives


@runtime_checkable
class HasRanks(Protocol):
    """A Runner of several ranks. Any thread may ask."""

    @property
    def rank_states(self) -> Sequence[RankState]:
        """By rank, all of them."""
        ...
