"""The order in which sequences wait."""

import pytest
from sequences import crowd

from gpu_worker.scheduling.state.wait_queue import WaitQueue


def test_queues_go_by_arrival_or_by_class_first() -> None:
    for policy, expected in {"fcfs": [0, 1, 2, 3], "priority": [2, 1, 3, 0]}.items():
        sequences = crowd((4, 0), (3, 1), (1, 2), (3, 3), policy=policy)
        queue = WaitQueue()
        for sequence in reversed(sequences):
            queue.add(sequence)
        assert [sequence.order for sequence in queue.sequences] == expected
        queue.remove(sequences[1])
        assert [sequence.order for sequence in queue.sequences] == [order for order in expected if order != 1]


def test_what_is_not_in_the_queue_cannot_be_removed() -> None:
    first, last = crowd((3, 1), (3, 2))
    queue = WaitQueue()
    for other in (first, last):
        with pytest.raises(KeyError):
            queue.remove(other)
        queue.add(first)
        queue.remove(first)
