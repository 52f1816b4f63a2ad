"""The order in which sequences wait: by arrival, or by class and then arrival."""

from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from gpu_worker.scheduling.sequence import Sequence

QueueKey = Callable[[Sequence], tuple[int, int]]


class WaitQueue:
    """Sequences in the order of a key that never changes; adding and removing cost O(log n) comparisons."""

    def __init__(self, key: QueueKey) -> None:
        self._key = key
        self._sequences: list[Sequence] = []

    @property
    def sequences(self) -> SequenceOf[Sequence]:
        """The sequences in order, for reading only. A caller that adds or removes while it reads copies them first."""
        return self._sequences

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if the sequence is not in the queue."""
        place = bisect_left(self._sequences, self._key(sequence), key=self._key)
        if self._sequences[place : place + 1] != [sequence]:
            raise KeyError(sequence.seq_id)
        del self._sequences[place]


def queue_key(policy: str) -> QueueKey:
    """The key of a policy: fcfs orders by arrival, priority by class and then arrival. Preemption changes no key."""
    if policy == "fcfs":
        return lambda sequence: (0, sequence.order)
    return lambda sequence: sequence.rank
