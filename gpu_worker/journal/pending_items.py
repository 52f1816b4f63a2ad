"""When the store is asked to append what steps brought: at once, or together with what the next steps bring.

An append costs the store about the same for one token as for four. A worker with few branches appends each step at
once: its share of the store's load is small, and its clients see each token when it is computed. A worker with many
branches lets the tokens of a few steps gather. What a client notices is never held back: the first token of a sequence,
and the end of a branch. Neither is the first token of a sequence that has moved here.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.step import Delta, StepDeltas
from octavo.store.calls import AppendItem

TIMER_S = 0.001  # nothing waits for less than this: a timer may end too early by a rounding error


@dataclass(frozen=True, slots=True)
class AppendPolicy:
    """How many tokens of a branch gather at most, for how long, and how many branches a step must run for that."""

    max_tokens: int = 1
    max_delay_s: float = 0.05
    from_branches: int = 32


@dataclass(slots=True)
class DeltaBatch:
    """Deltas that go to the store in one call. `steps` are those of which nothing is left to append after it."""

    deltas: list[Delta]
    steps: list[StepDeltas]
    last_step: StepDeltas


class PendingDeltas:
    """The deltas of steps that the store has not been asked to append, in the order in which they came."""

    def __init__(self, policy: AppendPolicy) -> None:
        self._policy = policy
        self._steps: list[StepDeltas] = []
        self._oldest = 0.0  # when the first of the steps came
        self._newest = -math.inf
        self._step_s = 0.0  # time between the last two steps
        self._urgent: set[tuple[Sequence, int]] = set()  # branches with a first token or an end
        self._hurried = False  # what is here now does not wait for more

    def add_step(self, result: StepDeltas, now: float) -> None:
        if not self._steps:
            self._oldest = now
        self._step_s, self._newest = now - self._newest, now
        self._steps.append(result)
        for delta in result.deltas:
            if delta.finish or delta.first_index == 0 or delta.cached_tokens is not None or follows_move(delta):
                self._urgent.add((delta.sequence, delta.branch_index))

    def hurry(self) -> None:
        """Makes all that is here due."""
        self._hurried = bool(self._steps)

    def next_batch(self, now: float) -> DeltaBatch | None:
        """Removes what is due, and returns it: everything, or the branches that cannot wait; None if nothing is due."""
        steps = self._steps
        if not steps:
            return None
        if any(step.granted_by is not None for step in steps):  # who grants single steps is told of each by itself
            self._steps = steps[1:]
            if not self._steps:
                self._urgent = set()
            return DeltaBatch(steps[0].deltas, steps[:1], steps[0])
        if self._is_due(now):
            self._steps, self._urgent, self._hurried = [], set(), False
            return DeltaBatch([delta for step in steps for delta in step.deltas], steps, steps[-1])
        if not self._urgent:
            return None
        deltas: list[Delta] = []
        for step in steps:
            mine = [(delta, (delta.sequence, delta.branch_index) in self._urgent) for delta in step.deltas]
            deltas += [delta for delta, urgent in mine if urgent]
            step.deltas = [delta for delta, urgent in mine if not urgent]
        self._steps, self._urgent = [step for step in steps if step.deltas], set()
        return DeltaBatch(deltas, [step for step in steps if not step.deltas], steps[-1])

    def _is_due(self, now: float) -> bool:
        """Whether all is to be appended: enough has gathered, or the next step would come too late to wait for it."""
        if self._hurried:
            return True
        policy = self._policy
        few = self._steps[-1].num_branches < policy.from_branches
        return few or len(self._steps) >= policy.max_tokens or self._due_in(now) <= max(self._step_s, TIMER_S)

    def _due_in(self, now: float) -> float:
        return self._oldest + self._policy.max_delay_s - now

    def wait_s(self, now: float) -> float | None:
        """How long the steps may wait for another one; None if there are none."""
        return max(0.0, self._due_in(now)) if self._steps else None


@dataclass(slots=True)
class BranchRun:
    """Deltas of one branch that continue each other, and that the store appends as one item."""

    sequence_log: SequenceLog
    deltas: list[Delta] = field(default_factory=list)

    @property
    def branch_index(self) -> int:
        return self.deltas[0].branch_index

    def continues_with(self, delta: Delta) -> bool:
        last = self.deltas[-1]
        return not last.finish and last.first_index + len(last.token_ids) == delta.first_index

    def to_item(self, from_index: int | None = None, before: Iterable[int] = ()) -> AppendItem:
        """What the store is asked to append; with `from_index`, from there on, beginning with the tokens `before`."""
        first, last = self.deltas[0], self.deltas[-1]
        return AppendItem(
            first.sequence.seq_id,
            first.sequence.epoch,
            first.branch_index,
            first.first_index if from_index is None else from_index,
            [*before, *(token for delta in self.deltas for token in delta.token_ids)],
            last.finish,
            last.failure,
            last.cumulative_logprob if last.finish else None,
        )


def follows_move(delta: Delta) -> bool:
    """Whether these are the first tokens of a branch since its sequence has moved here: its client has waited."""
    sequence = delta.sequence
    if sequence.carried is None:
        return False
    return delta.first_index == sequence.branches[delta.branch_index].num_journalled_at_start


def join_runs(deltas: Iterable[Delta], find_log: Callable[[Delta], SequenceLog | None]) -> list[BranchRun]:
    """The runs of branches that still have a log, in the order in which they begin."""
    latest: dict[tuple[Sequence, int], BranchRun] = {}
    runs: list[BranchRun] = []
    for delta in deltas:
        sequence_log = find_log(delta)
        if sequence_log is None:
            continue
        key = (delta.sequence, delta.branch_index)
        run = latest.get(key)
        if run is None or not run.continues_with(delta):
            run = latest[key] = BranchRun(sequence_log)
            runs.append(run)
        run.deltas.append(delta)
    return runs
