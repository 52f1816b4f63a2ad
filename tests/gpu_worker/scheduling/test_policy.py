"""Who gives way."""

from gpu_worker.scheduling.policy import WaitQueue, choose_victim, queue_key
from gpu_worker.scheduling.sequence import Sequence
from octavo.ids import SequenceId
from octavo.sampling import SamplingParams


def crowd(*ranks: tuple[int, int]) -> list[Sequence]:
    sequences = []
    for priority, order in ranks:
        sequences.append(Sequence(SequenceId(f"{priority}.{order}"), 1, [1], SamplingParams(), bytes(32), priority))
        sequences[-1].order = order
    return sequences


def test_the_lowest_class_newest_first_but_nobody_ranked_before_the_requester() -> None:
    high, old, new, low = running = crowd((1, 9), (3, 1), (3, 2), (4, 0))
    assert choose_victim(running, old, (), 0.0) is low
    assert choose_victim([high, old, new], old, (), 0.0) is new
    assert choose_victim([high, old, new], new, (), 0.0) is new  # it gives way itself
    assert choose_victim([high, old, new], new, (), 0.0, forced=True) is None
    assert choose_victim([new], new, (), 0.0) is None


def test_who_moves_or_was_preempted_a_moment_ago_is_spared_unless_forced() -> None:
    old, new, low = running = crowd((3, 1), (3, 2), (4, 0))
    assert choose_victim(running, old, {low}, 0.0) is new
    low.last_preempted = new.last_preempted = 5.0
    assert choose_victim(running, old, (), 4.0) is old  # the only one that may, and the others keep running
    assert choose_victim(running, old, (), 4.0, forced=True) is low
    assert choose_victim(running, old, {low}, 4.0, forced=True) is new


def test_queues_go_by_arrival_or_by_class_first() -> None:
    sequences = crowd((4, 0), (3, 1), (1, 2), (3, 3))
    for policy, expected in {"fcfs": [0, 1, 2, 3], "priority": [2, 1, 3, 0]}.items():
        queue = WaitQueue(queue_key(policy))
        for sequence in reversed(sequences):
            queue.add(sequence)
        assert [sequence.order for sequence in queue] == expected
        queue.remove(sequences[1])
        assert [sequence.order for sequence in queue] == [order for order in expected if order != 1]
