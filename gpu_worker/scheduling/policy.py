"""The decisions of the scheduler that need no state: its configuration, the order of queues, who gives way."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from gpu_worker.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much a step may hold and who comes first."""

    max_batch_tokens: int = 2048
    step_s: float = 0.0  # how long a step with prompts should take; 0: as long as max_batch_tokens take
    max_batch_sequences: int = 256  # rows that sample
    max_partial_prefills: int = 4  # prompts under way at a time
    max_long_partial_prefills: int = 1  # long ones among them
    long_prefill_threshold: int = 0  # tokens from which a prompt is long; 0: what a step may run
    chunked_prefill: bool = True  # False: prompts go first, whole where they fit a step, and never beside decodes
    prefix_caching: bool = True
    watermark: float = 0.01  # part of the blocks that admissions leave to those already running
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting: int = 1024
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    min_preempt_interval_s: float = 2.0
    debug: bool = False  # recount everything at every step, poison freed blocks

    def __post_init__(self) -> None:
        for name in ("max_batch_sequences", "max_partial_prefills", "max_long_partial_prefills", "max_waiting"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 1")
        for name in ("long_prefill_threshold", "min_preempt_interval_s", "step_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative")
        if not self.max_batch_tokens >= self.max_batch_sequences:
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} is below max_batch_sequences ({self.max_batch_sequences}), "
                "so that a full batch could not run"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: {self.watermark} is not in [0, 1)")


class WaitQueue:
    """Sequences in a fixed order; adding and removing cost O(log n) comparisons."""

    def __init__(self, key: Callable[[Sequence], tuple[int, int]]) -> None:
        self._key = key
        self._items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self._items, self._key(sequence), key=self._key)
        if self._items[place] is not sequence:
            raise KeyError(sequence.seq_id)
        del self._items[place]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)


def queue_key(policy: str) -> Callable[[Sequence], tuple[int, int]]:
    """fcfs goes by arrival alone, priority by class and then arrival. A preempted sequence keeps its place."""
    if policy == "fcfs":
        return lambda sequence: (0, sequence.order)
    return lambda sequence: sequence.rank


def choose_victim(
    running: Iterable[Sequence],
    requester: Sequence,
    protected: Collection[Sequence],
    since: float,
    *,
    forced: bool = False,
) -> Sequence | None:
    """Who gives its blocks to `requester`: the lowest class, newest first, and itself if that is the one.

    Nobody ranked before the requester, nobody whose blocks the step being planned moves, and nobody preempted after
    `since` unless `forced`. None: nobody, or the requester is the only one.
    """
    candidates = [sequence for sequence in running if sequence.rank >= requester.rank and sequence not in protected]
    others = any(sequence is not requester for sequence in running)
    if not forced:
        candidates = [sequence for sequence in candidates if sequence.last_preempted <= since]
    else:
        candidates = [sequence for sequence in candidates if sequence is not requester]
    if not candidates or not others:
        return None
    return max(candidates, key=lambda sequence: sequence.rank)
