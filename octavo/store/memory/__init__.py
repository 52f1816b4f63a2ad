"""The definition of the store: the functions of lua/ on plain values, for tests, simulation and one-process use."""

from octavo.store.memory.state import MemoryState
from octavo.store.memory.store import MemoryStore

__all__ = ["MemoryState", "MemoryStore"]
