"""When the store is asked to append what steps brought: at once, or together with what the next steps bring.

An append costs the store about the same for one token as for four. A worker with few branches appends each step at
once: its share of the store's load is small, and its clients see each token when it is computed. A worker with many
branches lets the tokens of a few steps gather. What a client notices is never held back: the first token of a sequence,
and the end of a branch. Neither is the first token of a sequence that has moved here.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.scheduling.state.step import StepItems
from octavo.request.step_item import StepItem
from octavo.store.calls import AppendItem

TIMER_S = 0.001  # nothing waits for less than this: a timer may end too early by a rounding error

FindLog = Callable[[StepItem], SequenceLog | None]


@dataclass(frozen=True, slots=True)
class AppendPolicy:
    """How many tokens of a branch gather at most, for how long, and how many branches a step must run for that."""

    max_tokens: int = 1
    max_delay_s: float = 0.05
    from_branches: int = 32


class BranchRun(NamedTuple):
    """Items of one branch that continue each other, and that the store appends as one."""

    sequence_log: SequenceLog
    items: list[StepItem]

    @property
    def branch(self) -> int:
        return self.items[0].branch

    def to_append(self, from_index: int | None = None, before: Iterable[int] = ()) -> AppendItem:
        """What the store is asked to append; with `from_index`, from there on, beginning with the tokens `before`."""
        first, last = self.items[0], self.items[-1]
        return AppendItem(
            first.seq_id,
            first.epoch,
            first.branch,
            first.first_index if from_index is None else from_index,
            [*before, *(token for item in self.items for token in item.token_ids)],
            last.finish,
            last.failure.to_json() if last.failure is not None else "",
            last.cumulative_logprob if last.finish else None,
            first.cached_tokens or 0,
        )


@dataclass(slots=True)
class ItemBatch:
    """What goes to the store in one call. `num_steps` are those of which nothing is left to append after it."""

    runs: list[BranchRun]
    num_steps: int
    last_step: StepItems


class PendingItems:
    """The items of steps that the store has not been asked to append, each with its log, in the order they came."""

    def __init__(self, policy: AppendPolicy, find_log: FindLog) -> None:
        self._policy = policy
        self._find_log = find_log
        self._steps: list[tuple[StepItems, list[tuple[SequenceLog, StepItem]]]] = []
        self._oldest = 0.0  # when the first of the steps came
        self._newest = -math.inf
        self._step_s = 0.0  # time between the last two steps
        self._urgent: set[tuple[SequenceLog, int]] = set()  # branches with a first token or an end
        self._hurried = False  # what is here now does not wait for more

    def add_step(self, result: StepItems, now: float) -> None:
        """Adds what a step has brought. What has no log any more is forgotten."""
        if not self._steps:
            self._oldest = now
        self._step_s, self._newest = now - self._newest, now
        logged = [(log, item) for item in result.items if (log := self._find_log(item)) is not None]
        self._steps.append((result, logged))
        for log, item in logged:
            if item.finish or item.first_index == 0 or item.cached_tokens is not None or log.follows_move(item):
                self._urgent.add((log, item.branch))

    def hurry(self) -> None:
        """Makes all that is here due."""
        self._hurried = bool(self._steps)

    def next_batch(self, now: float) -> ItemBatch | None:
        """Removes what is due, and returns it: everything, or the branches that cannot wait; None if nothing is due."""
        steps = self._steps
        if not steps:
            return None
        last_step, left = steps[-1][0], list[tuple[StepItems, list[tuple[SequenceLog, StepItem]]]]()
        if any(step.granted_by is not None for step, _ in steps):  # who grants single steps is told of each by itself
            due, left, last_step = steps[0][1], steps[1:], steps[0][0]
            self._urgent = self._urgent if left else set()
        elif self._is_due(now):
            due, self._urgent, self._hurried = [each for _, logged in steps for each in logged], set(), False
        elif self._urgent:
            due, urgent, self._urgent = [], self._urgent, set()
            for step, logged in steps:
                due += [(log, item) for log, item in logged if (log, item.branch) in urgent]
                if rest := [(log, item) for log, item in logged if (log, item.branch) not in urgent]:
                    left.append((step, rest))
        else:
            return None
        self._steps = left
        return ItemBatch(join_runs(due), len(steps) - len(left), last_step)

    def _is_due(self, now: float) -> bool:
        """Whether all is to be appended: enough has gathered, or the next step would come too late to wait for it."""
        if self._hurried:
            return True
        policy = self._policy
        few = self._steps[-1][0].num_branches < policy.from_branches
        return few or len(self._steps) >= policy.max_tokens or self._due_in(now) <= max(self._step_s, TIMER_S)

    def _due_in(self, now: float) -> float:
        return self._oldest + self._policy.max_delay_s - now

    def wait_s(self, now: float) -> float | None:
        """How long the steps may wait for another one; None if there are none."""
        return max(0.0, self._due_in(now)) if self._steps else None


def join_runs(logged: Iterable[tuple[SequenceLog, StepItem]]) -> list[BranchRun]:
    """The runs of branches that have not ended by now, in the order in which they begin."""
    latest: dict[tuple[SequenceLog, int], BranchRun] = {}
    runs: list[BranchRun] = []
    for log, item in logged:
        if log.gone or log.branches[item.branch].ended:
            continue
        key = (log, item.branch)
        run = latest.get(key)
        if run is None or run.items[-1].finish or run.items[-1].end != item.first_index:
            run = latest[key] = BranchRun(log, [])
            runs.append(run)
        run.items.append(item)
    return runs
