"""Where a sequence is, what holds it there, and which of these exclude each other.

    admit ─▶ WAITING ─▶ STARTING ─▶ RUNNING ◀─▶ FROZEN
                ▲           │         │ ▲
                └───────────┴─────────┤ │     a sequence with one branch, or whose branches fork, is never STARTING
                                      ▼ │
                                    SWAPPED

A **suspect** may have killed its owners (CRASHED) or failed the step it was in (FAILED). No other sequence is in a step
of a suspect. After a crash it does not run at all before its **trial**, in which it has the engine to itself.
"""

from collections.abc import Set as AbstractSet
from enum import Enum


class Place(Enum):
    """Where a sequence is. It follows from the states of its branches, and from freezes."""

    ABSENT = "absent"  # not admitted yet, or ended
    WAITING = "waiting"  # has no blocks
    STARTING = "starting"  # some branches have blocks on the device, others wait to be started
    RUNNING = "running"  # all branches that go on have blocks on the device, or will fork from one that has
    FROZEN = "frozen"  # RUNNING, but it is in no step, while another worker takes it over with its blocks
    SWAPPED = "swapped"  # its blocks are in the host pool


class Hold(Enum):
    """Why a sequence, or a part of it, does not run where it is."""

    REQUESTED = "requested"  # a caller has swapped it out: it neither starts nor comes back before IN, DROP or a drain
    AWAITS_PREFIX = "awaits prefix"  # blocks of its prompt are on their way from another worker: it starts after that
    CRASHED = "crashed"  # its owners have crashed: it runs in its trial only
    FAILED = "failed"  # it was in a step that failed: it is by itself in its steps until one of them has not failed
    STARVED = "starved"  # a suspect that has found no room: no other sequence starts before it
    FORKS = "forks"  # until branch 0 has computed the prompt: then the other branches fork from it
    UNREPORTED = "unreported"  # its first item has not been made: a prefill makes it, so the sequence does not decode


QUEUED = frozenset({Place.WAITING, Place.STARTING})  # some branch is WAITING and to be started
ON_DEVICE = frozenset({Place.STARTING, Place.RUNNING, Place.FROZEN})
KEPT_BACK = frozenset({Hold.REQUESTED, Hold.AWAITS_PREFIX})  # it does not come in, and others overtake it
SUSPECT = frozenset({Hold.CRASHED, Hold.FAILED})

EXCLUDES: dict[Hold, frozenset[Place | Hold]] = {
    Hold.REQUESTED: ON_DEVICE | {Hold.CRASHED, Hold.STARVED},
    Hold.AWAITS_PREFIX: ON_DEVICE | SUSPECT | {Place.SWAPPED, Hold.STARVED},
    Hold.CRASHED: frozenset({Place.FROZEN}),
    Hold.FAILED: frozenset({Place.FROZEN}),
    Hold.STARVED: frozenset({Place.RUNNING, Place.FROZEN}),
    Hold.FORKS: frozenset({Place.STARTING, Place.FROZEN}),
    Hold.UNREPORTED: frozenset({Place.FROZEN}),
}


def check_holds(place: Place, holds: AbstractSet[Hold]) -> None:
    """Raises AssertionError if a sequence in this place cannot have all these holds."""
    for hold in holds:
        for excluded in EXCLUDES[hold]:
            if excluded is place or excluded in holds:
                raise AssertionError(f"{hold} excludes {excluded}")
    if Hold.STARVED in holds and holds.isdisjoint(SUSPECT):
        raise AssertionError("a sequence that is no suspect is starved")
