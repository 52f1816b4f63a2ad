"""The order in which sequences wait: by rank, which is by arrival, or by class and then arrival."""

from bisect import bisect_left, insort
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from gpu_worker.scheduling.state.sequence import Sequence

_rank = attrgetter("rank")


class WaitQueue:
    """Sequences by their ranks, which never change; adding and removing cost O(log n) comparisons."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    @property
    def sequences(self) -> SequenceOf[Sequence]:
        """The sequences in order, for reading only. A caller that adds or removes while it reads copies them first."""
        return self._sequences

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if the sequence is not in the queue."""
        place = bisect_left(self._sequences, sequence.rank, key=_rank)
        if self._sequences[place : place + 1] != [sequence]:
            raise KeyError(sequence.seq_id)
        del self._sequences[place]


def rank_of(sequence: Sequence, policy: str) -> tuple[int, int]:
    """The rank of a sequence: fcfs orders by arrival alone, priority by class and then arrival.

    The sequence of the lower rank starts first, and keeps its blocks when blocks are short.
    """
    return (sequence.priority if policy == "priority" else 0, sequence.order)
