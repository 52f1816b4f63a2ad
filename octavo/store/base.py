"""The store as its users see it. `octavo.store.memory` defines it, `octavo.store.redis` is the one for production."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from octavo.ids import Incarnation, SequenceId
from octavo.record import NewSequence, Record, Snapshot
from octavo.store.calls import (
    AcceptReply,
    AppendItem,
    AppendReply,
    Finish,
    Member,
    MigrateReply,
    Notice,
    PoppedSequence,
    QueueDepth,
    QueueLimits,
    SweepReport,
    TakeReply,
    TakeRequest,
)


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
    async def accept(self, new: NewSequence, limits: QueueLimits) -> AcceptReply:
        """Writes the record at epoch 0 and puts it into the queue. A router heartbeats before its first one."""
        ...

    async def pop(self, router: Incarnation, count: int, claim_ms: int) -> list[PoppedSequence]:
        """The first in the queue, for this router to take until the claim ends; nothing past its deadline."""
        ...

    async def requeue(self, seq_id: SequenceId, epoch: int) -> bool:
        """Gives a popped or running sequence back to its old place in the queue, without an owner; whether it waits.

        A running one moves to epoch+1, so that its owner is fenced. A cancelled one ends instead (False).
        """
        ...

    async def take_ownership(self, request: TakeRequest) -> TakeReply:
        """Makes a worker the owner at epoch+1. `queued` takes only what waits, all others only what runs.

        `lease` and `connection` count a crash of the old owner (not if it is the new one as well). What was cancelled,
        or is past its deadline, ends instead: CLOSED.
        """
        ...

    async def append_batch(self, items: Sequence[AppendItem]) -> list[AppendReply]:
        """Journals tokens, in the order given; one answer per item. Overlap with the journal is compared, not repeated.

        Two calls under way at once may arrive in either order: a worker sends a branch's next after the answer.
        """
        ...

    async def finish(self, finish: Finish) -> bool:
        """Ends a branch by a decision that is a function of the journal alone, or before the branch began.

        A `length` stands also where the worker has gone past it and has ended the branch further on (STOP or LENGTH),
        whether the sequence is over or not. True if a branch that was meant ends for this reason, now or before.
        """
        ...

    async def read(
        self, seq_id: SequenceId, *, prompt: bool = False, from_indexes: Sequence[int] | None = None
    ) -> Snapshot | None: ...
    async def cancel(self, seq_id: SequenceId) -> Record | None:
        """Ends a waiting sequence; a running one is told at its next append. The record afterwards; None: not found."""
        ...

    async def attach(self, seq_id: SequenceId, router: Incarnation) -> Record | None:
        """This router has the client from now on, and gets the notices. The record afterwards; None: not found."""
        ...

    async def detach(self, seq_id: SequenceId, router: Incarnation) -> None:
        """The client has left; nothing happens if it is attached elsewhere by now."""
        ...

    # Migration
    async def mig_begin(self, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation) -> MigrateReply: ...
    async def mig_commit(
        self, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation, num_tokens: Sequence[int]
    ) -> MigrateReply: ...
    async def mig_abort(self, seq_id: SequenceId, epoch: int, mig_id: str) -> MigrateReply: ...

    # Members and housekeeping
    async def heartbeat(self, member: Member, lease_ms: int) -> None:
        """Renews the member's lease and its description."""
        ...

    async def leave(self, member: Member) -> None:
        """Ends the lease at once."""
        ...

    async def members(self, kind: str) -> list[Member]:
        """Those with a lease, by id."""
        ...

    async def sweep(self, limit: int, grace_ms: int) -> SweepReport:
        """Housekeeping that any router does for all: looks at up to `limit` sequences whose check is due.

        Unused claims go back to the queue, what waits past its deadline ends, what nobody is attached to for longer
        than the grace is cancelled (unless it is kept), and running ones without a living owner are reported.
        """
        ...

    async def list_sequences(self, owner: Incarnation | None, limit: int) -> list[Record]:
        """Live sequences, in no order."""
        ...

    async def queue_depth(self) -> QueueDepth:
        """How much waits, over all shards."""
        ...

    async def secret(self, name: str) -> bytes:
        """32 random bytes that all processes on this store share, made by whoever asks first."""
        ...

    def notices(self, router: Incarnation) -> AsyncIterator[Notice]:
        """What happens to sequences attached to this router (its own doings too), and "queued" for whatever waits.

        A hint, not a promise: notices are lost while the connection is. Whoever listens also looks now and then.
        """
        ...
