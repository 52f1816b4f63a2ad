"""Visits every state that a model can reach, breadth first, and says what is wrong with which of them.

A model is a graph: states are values that can be hashed, steps lead from one to others. A trace is a shortest one.
"""

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Step(NamedTuple):
    """One thing that can happen in a state."""

    what: str
    state: Hashable  # afterwards
    wrong: str = ""  # what rule the step breaks


class Model(Protocol):
    def initial(self) -> Hashable: ...
    def steps(self, state: Hashable) -> Iterable[Step]: ...


@dataclass(frozen=True, slots=True)
class Exploration:
    """What an exploration found. `wrong` is empty if every step keeps all rules."""

    num_states: int
    num_steps: int
    seconds: float  # of this process
    complete: bool  # whether every state that can be reached was visited
    wrong: str
    trace: tuple[str, ...]  # the steps that lead to what is wrong

    @property
    def good(self) -> bool:
        return self.complete and not self.wrong


def explore(model: Model, max_states: int) -> Exploration:
    """Visits all states, at most `max_states` of them, until a step breaks a rule."""
    start = time.process_time()
    order = [model.initial()]
    seen, parents, labels, num_steps = {order[0]}, [-1], [""], 0

    def found(wrong: str = "", index: int = 0, last: str = "", *, complete: bool = True) -> Exploration:
        trace = [last] if last else []
        while index > 0:
            trace.append(labels[index])
            index = parents[index]
        seconds = time.process_time() - start
        return Exploration(len(order), num_steps, seconds, complete, wrong, tuple(reversed(trace)))

    for at, state in enumerate(order):  # which grows meanwhile
        for what, after, wrong in model.steps(state):
            num_steps += 1
            if wrong:
                return found(wrong, at, what)
            if after not in seen:
                seen.add(after)
                order.append(after)
                parents.append(at)
                labels.append(what)
        if len(order) > max_states:
            return found(complete=False)
    return found()
