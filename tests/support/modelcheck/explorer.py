"""Visits every state that a model can reach, breadth first, and says what is wrong with which of them.

A model is a graph: states are values that can be hashed, steps lead from one to others. The explorer knows nothing else
of it. A trace that it returns is a shortest one.
"""

import time
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Step(NamedTuple):
    """One thing that can happen in a state."""

    what: str
    state: Hashable  # afterwards
    progress: bool = True  # False: a fault, or something that nobody may wait for
    wrong: str = ""  # what rule the step itself breaks


class Model(Protocol):
    def initial(self) -> Hashable: ...
    def steps(self, state: Hashable) -> Iterable[Step]: ...
    def wrong(self, state: Hashable) -> str:
        """What rule the state breaks; empty if none."""
        ...

    def is_end(self, state: Hashable) -> bool:
        """Whether nothing has to happen any more."""
        ...


@dataclass(frozen=True, slots=True)
class Exploration:
    """What an exploration found. `wrong` is empty if every state and every step keeps all rules."""

    num_states: int
    num_steps: int
    seconds: float  # of this process
    complete: bool  # whether every state that can be reached was visited
    wrong: str
    trace: tuple[str, ...]  # the steps that lead to what is wrong
    longest: int  # the number of steps to the farthest state

    @property
    def good(self) -> bool:
        return self.complete and not self.wrong


def explore(model: Model, max_states: int, max_s: float = float("inf")) -> Exploration:
    """Visits all states, at most `max_states` of them, until one breaks a rule.

    If none does, every state must have a path of steps with `progress` to an end; one that has none is "stuck".
    """
    start = time.process_time()
    first = model.initial()
    order, seen, parents, depths = [first], {first: 0}, array("q", [-1]), array("i", [0])
    labels = [""]
    sources, targets = array("q"), array("q")  # of steps with progress
    num_steps, at = 0, 0

    def found(wrong: str, index: int, last: str = "", *, complete: bool = True) -> Exploration:
        trace = [last] if last else []
        while index > 0:
            trace.append(labels[index])
            index = parents[index]
        seconds = time.process_time() - start
        return Exploration(len(order), num_steps, seconds, complete, wrong, tuple(reversed(trace)), max(depths))

    if wrong := model.wrong(first):
        return found(wrong, 0)
    while at < len(order):
        state = order[at]
        for what, after, progress, wrong in model.steps(state):
            num_steps += 1
            if wrong:
                return found(wrong, at, what)
            if after == state:
                continue
            index = seen.get(after)
            if index is None:
                index = seen[after] = len(order)
                order.append(after)
                parents.append(at)
                labels.append(what)
                depths.append(depths[at] + 1)
                if wrong := model.wrong(after):
                    return found(wrong, index)
            if progress:
                sources.append(at)
                targets.append(index)
        at += 1
        if len(order) > max_states or (at % 256 == 0 and time.process_time() - start > max_s):
            return found("", 0, complete=False)
    stuck = _first_stuck([model.is_end(state) for state in order], sources, targets)
    return found("", 0) if stuck < 0 else found("stuck: no end can be reached without another fault", stuck)


def _first_stuck(live: list[bool], sources: "array[int]", targets: "array[int]") -> int:
    """The first state from which no path leads to an end; -1 if there is none."""
    offsets = array("q", bytes(8 * (len(live) + 1)))
    for target in targets:
        offsets[target + 1] += 1
    for i in range(len(live)):
        offsets[i + 1] += offsets[i]
    before, fill = array("q", bytes(8 * len(sources))), array("q", offsets)
    for source, target in zip(sources, targets, strict=True):
        before[fill[target]] = source
        fill[target] += 1
    todo = [i for i, end in enumerate(live) if end]
    while todo:
        target = todo.pop()
        for k in range(offsets[target], offsets[target + 1]):
            if not live[before[k]]:
                live[before[k]] = True
                todo.append(before[k])
    return next((i for i, end in enumerate(live) if not end), -1)
