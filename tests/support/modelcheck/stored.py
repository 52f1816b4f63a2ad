"""The states of the real store functions, as numbers.

The functions of octavo.store.memory change a MemoryState in place. Here each MemoryState that comes up gets a number,
and a call on a number is computed once and remembered. Equal states get one number: all that a function could tell
them apart by is equal. Time does not pass by itself: `advance` makes all times of a state earlier instead.
"""

import dataclasses
from collections.abc import Callable, Coroutine, Hashable
from enum import Enum
from typing import Any

from octavo.store.memory import MemoryState, MemoryStore

NOW_MS = 10**15  # far from every other number of a state, so that a number near it is a time
# Where a time is kept since when something is so, `PAST_MS` ago is the longest. Elsewhere a time that has come is past.
SINCE, PAST_MS = {"_entries", "detached"}, 3_000
SOON_MS = 30_000  # what is further off does not come nearer
FORGOTTEN = {"timeline": (), "accepted_ms": NOW_MS}  # fields of a record that no function reads
SKIPPED = {"now_ms", "subscribers"}


def now_ms() -> int:
    return NOW_MS


class StoreModel:
    """All states that the calls so far have led to. Number 0 is the empty store."""

    def __init__(self) -> None:
        self._states: list[MemoryState] = []
        self._numbers: dict[Hashable, int] = {}
        self._calls: dict[Hashable, tuple[int, Any]] = {}
        self._read: dict[Hashable, Any] = {}
        empty = MemoryState(now_ms)
        empty.generation = 1
        self._number(empty)

    def __len__(self) -> int:
        return len(self._states)

    def view(self, number: int) -> MemoryState:
        """A state to look at. Nobody may change it."""
        return self._states[number]

    def call(self, number: int, function: str, *args: Any, **kwargs: Any) -> tuple[int, Any]:
        """The number of the state after a call of a function of MemoryStore, and the call's reply."""
        key = (number, function, args, tuple(kwargs.items()))
        if key not in self._calls:
            self._calls[key] = self.change(
                number, lambda state: finished(getattr(MemoryStore(state), function)(*args, **kwargs))
            )
        return self._calls[key]

    def apply(self, number: int, name: Hashable, act: Callable[[MemoryState], Any]) -> int:
        """The number of the state after something else than a call. `name` names what `act` does."""
        key = (number, name)
        if key not in self._calls:
            self._calls[key] = self.change(number, act)
        return self._calls[key][0]

    def change(self, number: int, act: Callable[[MemoryState], Any]) -> tuple[int, Any]:
        state = self._copy(number)
        reply = act(state)
        return self._number(state), reply

    def advance(self, number: int, ms: int) -> int:
        """The number of the state so much later."""
        return self.apply(number, ("advance", ms), lambda state: _advance(state, ms))

    def _copy(self, number: int) -> MemoryState:
        old = self._states[number]
        state = object.__new__(MemoryState)
        vars(state).update({name: _copied(value) for name, value in vars(old).items()})
        return state

    def _number(self, state: MemoryState) -> int:
        for stored in state._entries.values():
            for name, value in FORGOTTEN.items():
                setattr(stored.record, name, value)
        key = tuple([_frozen(value) for name, value in vars(state).items() if name not in SKIPPED])
        number = self._numbers.setdefault(key, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number


def finished(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a function of the store waited")


PLAIN = (str, int, bytes, float, Enum, type(None))
_fields: dict[type, tuple[str, ...]] = {}


def _names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass; none of another class."""
    if kind not in _fields:
        _fields[kind] = (
            tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
        )
    return _fields[kind]


def _copied(value: Any) -> Any:
    """A copy of what can change."""
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    if kind is set:
        return set(value)
    names = _names(kind)
    if not names or kind.__dataclass_params__.frozen:
        return value
    copied = object.__new__(kind)
    for name in names:
        setattr(copied, name, _copied(getattr(value, name)))
    return copied


def _frozen(value: Any) -> Hashable:
    """A value that can be hashed, and equal for equal states."""
    if isinstance(value, PLAIN):
        return value
    kind = type(value)
    if kind is dict:
        return tuple(sorted([(key, _frozen(item)) for key, item in value.items()]))
    if kind is set or kind is frozenset:
        return ("set", *sorted(value))
    if isinstance(value, list | tuple):
        return tuple([_frozen(item) for item in value])
    if names := _names(kind):
        return tuple([_frozen(getattr(value, name)) for name in names])
    raise TypeError(f"the state of the store has a {kind}, which the model checker does not know")


def _moved(value: Any, ms: int, floor: int) -> Any:
    """The value `ms` later: times are earlier, but none is before `floor`. What can change is changed in place."""
    kind = type(value)
    if kind is int:
        is_near = abs(value - NOW_MS) < 10**12 and value <= NOW_MS + SOON_MS
        return max(value - ms, floor) if is_near else value
    if isinstance(value, PLAIN):
        return value
    if kind is dict:
        for key, item in value.items():
            value[key] = _moved(item, ms, floor)
    elif kind is list:
        value[:] = [_moved(item, ms, floor) for item in value]
    elif isinstance(value, tuple):
        later = tuple(_moved(item, ms, floor) for item in value)
        return kind._make(later) if hasattr(kind, "_make") else later
    elif names := _names(kind):
        moved = {name: _moved(getattr(value, name), ms, floor) for name in names}
        if kind.__dataclass_params__.frozen:
            return dataclasses.replace(value, **moved)
        for name, item in moved.items():
            setattr(value, name, item)
    return value


def _advance(state: MemoryState, ms: int) -> None:
    for name, value in vars(state).items():
        if name not in SKIPPED:
            floor = NOW_MS - PAST_MS if name in SINCE else NOW_MS
            setattr(state, name, _moved(value, ms, floor))
