"""What the store knows of an owner from whom a sequence is to be taken: whether it has left, lives, or is late."""

from octavo.request.ids import Incarnation
from octavo.store.calls import TakeReason
from octavo.store.memory.state import MemoryState

RENEWALS_PER_LEASE = 3  # how often a member renews its lease within the lease
LATE_RENEWAL_MS = 200  # how late a renewal may come before it counts as missed


def has_left(state: MemoryState, owner: Incarnation) -> bool:
    """Whether the owner has stopped on purpose.

    Its sequences may be taken at once, and a take from it counts no crash.
    """
    return state.tombstones.get(owner, 0) > state.now_ms()


def protected_ms(state: MemoryState, owner: Incarnation, reason: TakeReason) -> int:
    """For how long the lease still protects the owner from a take for this reason; 0 if it does not.

    A router that has lost its connection to the owner needs less than the end of the lease as evidence, and yet more
    than its own word: a missed renewal.
    """
    lease = state.leases.get(owner)
    if lease is None:
        return 0
    until = lease.until_ms
    if reason is TakeReason.CONNECTION:
        until = min(until, until - lease.length_ms + lease.length_ms // RENEWALS_PER_LEASE + LATE_RENEWAL_MS)
    return max(0, until - state.now_ms())
