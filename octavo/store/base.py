"""The store as its users see it. `octavo.store.memory` defines it, `octavo.store.redis` is the one for production."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from octavo.ids import Incarnation, SequenceId
from octavo.record import (
    Accepted,
    Append,
    Appended,
    Member,
    Migrated,
    NewSequence,
    Notice,
    Popped,
    QueueLimits,
    Record,
    Snapshot,
    Swept,
    Taken,
    Why,
)
from octavo.sampling import FinishReason


class Store(Protocol):
    """Every method is one atomic function of the store, or a batch of them, and idempotent.

    All raise errors.StoreUnavailable when the store does not answer; nothing else of the transport comes through.
    A generation that has moved on (the store restarted) is picked up inside and the call repeated.
    """

    @property
    def generation(self) -> int: ...

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    # A sequence's life
    async def accept(self, new: NewSequence, limits: QueueLimits) -> Accepted: ...
    async def pop(self, router: Incarnation, count: int, claim_ms: int) -> list[Popped]: ...
    async def requeue(self, seq_id: SequenceId, epoch: int) -> bool:
        """Gives a popped, taken or running sequence back to the head of its class, without an owner."""
        ...

    async def take(
        self, seq_id: SequenceId, expected_epoch: int, new_owner: Incarnation, take_id: str, why: Why
    ) -> Taken: ...
    async def append_batch(self, items: Sequence[Append]) -> list[Appended]: ...
    async def finish(
        self, seq_id: SequenceId, branch: int, reason: FinishReason, length: int | None, failure: str = ""
    ) -> bool:
        """Ends a branch (-1: all that run) by a decision that is a function of the journal, or before it began."""
        ...

    async def read(
        self, seq_id: SequenceId, *, prompt: bool = False, from_indexes: Sequence[int] | None = None
    ) -> Snapshot | None: ...
    async def cancel(self, seq_id: SequenceId) -> Record | None: ...
    async def attach(self, seq_id: SequenceId, router: Incarnation) -> Record | None: ...
    async def detach(self, seq_id: SequenceId, router: Incarnation) -> None: ...

    # Migration
    async def mig_begin(self, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation) -> Migrated: ...
    async def mig_commit(
        self, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation, num_tokens: Sequence[int]
    ) -> Migrated: ...
    async def mig_abort(self, seq_id: SequenceId, epoch: int, mig_id: str) -> Migrated: ...

    # Members and housekeeping
    async def heartbeat(self, member: Member, lease_ms: int) -> None: ...
    async def leave(self, member: Member) -> None: ...
    async def members(self, kind: str) -> list[Member]: ...
    async def sweep(self, limit: int, grace_ms: int) -> Swept: ...
    async def list_sequences(self, owner: Incarnation | None, limit: int) -> list[Record]: ...
    async def queue_depth(self) -> tuple[int, int]:
        """(requests, tokens) waiting."""
        ...

    async def secret(self, name: str) -> bytes:
        """32 random bytes that all processes on this store share, made by whoever asks first."""
        ...

    def notices(self, router: Incarnation) -> AsyncIterator[Notice]: ...
