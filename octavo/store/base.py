"""The interface of the store. docs/protocol-reference.md says what each function promises, and why.

`octavo.store.memory` defines the functions on plain values; `octavo.store.redis` is the store for production.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Protocol

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import NewSequence, Record, Snapshot
from octavo.store.calls import (
    AcceptReply,
    AppendItem,
    AppendReply,
    AppendStatus,
    Finish,
    Member,
    MigrateReply,
    NameHolder,
    Notice,
    OwnedSequence,
    QueueDepth,
    QueueDepths,
    QueueLimits,
    Renewal,
    SweepReport,
    TakeReply,
    TakeRequest,
    WorkerLimits,
)


class Store(Protocol):
    """Every method is one atomic function of the store, or a batch of them, and may be called again.

    Every method raises errors.StoreUnavailable when the store does not answer, and no other error of the connection.
    Only `accept` raises errors.StoreFull: when the server has used up its `maxmemory`, what it has accepted goes on.
    If the store has begun a new generation (it has restarted), the method learns it and repeats its call.
    """

    @property
    def generation(self) -> int: ...

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    # A sequence's life
    async def accept(self, new: NewSequence, limits: QueueLimits) -> AcceptReply:
        """Writes the record at epoch 0 and puts the sequence into the queue.

        A router calls `heartbeat` before its first `accept`. Raises StoreFull.
        """
        ...

    async def accepting(self) -> bool:
        """Whether the store has memory for a new request: if not, `accept` raises StoreFull."""
        ...

    async def pop(self, model: str, count: int, claim_ms: int, places: int = 0, most_kept: int = 0) -> list[Snapshot]:
        """The first sequences in the queue of a model (its fingerprint), claimed for the caller until the claim ends.

        The claim ends with a take, a requeue, or its time. The snapshots are complete. A sequence past its deadline
        ends instead.

        `places` is how many more sequences the workers have room for. Up to `most_kept` of these places are kept for
        tenants that had less than their share, while such tenants send sequences: what is over its share then waits.
        """
        ...

    async def requeue(self, seq_id: SequenceId, epoch: int) -> bool:
        """Puts a popped or running sequence back at its old place in the queue, without an owner.

        A running sequence moves to epoch + 1, so that its owner is fenced. If it was cancelled, it ends instead.
        Returns whether the sequence waits now.
        """
        ...

    async def take_ownership(self, request: TakeRequest) -> TakeReply:
        """Makes a worker the owner at epoch + 1.

        The reason QUEUED is for a sequence that waits, the others are for one that runs. LEASE and CONNECTION count a
        crash of the old owner, unless it is the new owner, too, or has left. A sequence that was cancelled or is past
        its deadline ends instead: CLOSED.
        """
        ...

    async def announce(self, seq_id: SequenceId, epoch: int, owner: Incarnation) -> bool:
        """Notes that the owner of this epoch is about to run the sequence, if the sequence is a suspect.

        Returns whether this worker is that owner; if not, it must not run the sequence. The death of an owner counts
        against a suspect only after this.
        """
        ...

    async def append_batch(self, owner: Incarnation, items: Sequence[AppendItem]) -> list[AppendReply]:
        """Appends tokens to journals on behalf of their owner, in the order of the items; one reply per item.

        Tokens that the journal has already are compared, and not appended again. Two calls at once may arrive in
        either order, so a worker sends the next item of a branch after the reply to the last one.
        """
        ...

    async def note_progress(self, seq_id: SequenceId, epoch: int, owner: Incarnation, num_tokens: int) -> AppendStatus:
        """Notes how many output tokens the owner has computed since the take, for outputs that reach the journal at
        their end.

        Like tokens in the journal, these prove that the sequence does not kill its owners: those of up to MAX_PARDONS
        owners in a row, and of each that got further than all before it. The answer is that of an append: OK,
        OK_CANCEL, FENCED, CLOSED or GONE.
        """
        ...

    async def finish(self, finish: Finish) -> bool:
        """Ends one branch, or every branch that still runs.

        With an epoch, nothing ends unless the record is at that epoch. Without one, this may only be decided where
        every router decides alike. With STOP and a
        `length`, the end of a branch that its worker has ended further on (STOP or LENGTH) moves back to `length`, even
        if the sequence has ended. Returns whether one of the branches has this reason.
        """
        ...

    async def read(
        self, seq_id: SequenceId, *, prompt: bool = False, from_indexes: Sequence[int] | None = None
    ) -> Snapshot | None:
        """The record of a sequence; with `prompt`, its prompt, too; with `from_indexes`, its journals from there on.

        `from_indexes` has one index per branch. None if there is no such record.
        """
        ...

    async def cancel(self, seq_id: SequenceId) -> Record | None:
        """Ends a waiting sequence; tells the owner of a running one at its next append.

        The result is the record after that; None if there is no such record.
        """
        ...

    async def attach(self, seq_id: SequenceId, router: Incarnation) -> Record | None:
        """Adds this router to those that get the notices of the sequence: it has a client now.

        The result is the record after that; None if there is no such record.
        """
        ...

    async def detach(self, seq_id: SequenceId, router: Incarnation) -> None:
        """Notes that the client has left this router. Others may still be attached.

        If none is, and a sweep has put the grace off because a router was dead, the grace begins now.
        """
        ...

    # Migration
    async def mig_begin(self, seq_id: SequenceId, epoch: int, number: int, target: Incarnation) -> MigrateReply:
        """Notes in the record that the sequence moves to `target`. The owner goes on.

        The number is higher than that of each earlier migration at this epoch, which it replaces.
        """
        ...

    async def mig_commit(
        self, seq_id: SequenceId, epoch: int, number: int, target: Incarnation, num_tokens: Sequence[int]
    ) -> MigrateReply:
        """Makes the target the owner at epoch + 1, if each journal is as long as `num_tokens` says."""
        ...

    async def mig_abort(self, seq_id: SequenceId, epoch: int, number: int) -> MigrateReply:
        """Ends the migration of this number without a new owner, even if its begin arrives later.

        Of commit and abort of one number, only the first one takes effect.
        """
        ...

    # Members and housekeeping
    async def register(self, member: Member, lease_ms: int) -> NameHolder | None:
        """Gives the name to a member that has just started, for one lease. The member gets no lease by this.

        If a member at another endpoint has the name, the result says which, and nothing changes.
        """
        ...

    async def heartbeat(self, member: Member, lease_ms: int) -> Renewal:
        """Renews the member's lease, its description, and its hold on its name.

        If another member has the name by now, the result says which, and nothing changes. A router whose lease had
        ended attaches its clients again: a sweep may have detached them.
        """
        ...

    async def leave(self, member: Member) -> None:
        """Ends the lease at once, and gives up the name.

        What a worker that has left still owns may be taken at once, and such a take counts no crash.
        """
        ...

    async def members(self, kind: str) -> list[Member]:
        """The members of one kind whose lease runs, in the order of their ids."""
        ...

    async def note_limits(self, seen: Collection[WorkerLimits], kept_ms: int) -> list[WorkerLimits]:
        """Remembers that workers with these limits are there now.

        The result is the limits of all workers of any model that were there within the last `kept_ms`; older ones are
        forgotten.
        """
        ...

    async def sweep(self, limit: int, grace_ms: int, interval_ms: int = 0) -> SweepReport:
        """Housekeeping that every router does for all routers: up to `limit` sequences of each kind of work.

        Sequences with an unused claim go back to the queue. Sequences past their deadline end: waiting ones at once,
        running ones two seconds later. Routers without a lease lose their attachments. Sequences that no client is
        attached to for longer than the grace are cancelled, unless they are kept. Running sequences without a living
        owner are reported. Of what dead members have left, each one has an equal share of the limit, and at least one
        sequence. A call less than the last one's `interval_ms` after it does nothing.
        """
        ...

    async def list_sequences(self, owner: Incarnation | None, limit: int) -> list[Record]:
        """Up to `limit` live sequences of one owner, or of all owners, in no particular order."""
        ...

    async def owned(self, owner: Incarnation, besides: Collection[SequenceId] = ()) -> list[OwnedSequence]:
        """What a worker owns by the records besides these sequences, in the order of the queue."""
        ...

    async def queue_depth(self) -> QueueDepth:
        """How much waits, for any model."""
        ...

    async def model_depths(self) -> dict[str, QueueDepth]:
        """How much waits, by the fingerprint of the model. Models of which nothing waits are left out."""
        ...

    async def describe_model(self, name: str, description: bytes) -> None:
        """Keeps what a router knows of the model of that name, for months. The last description counts."""
        ...

    async def model_descriptions(self) -> dict[str, bytes]:
        """The descriptions that are kept, by the names of the models."""
        ...

    async def tenant_depths(self, limit: int) -> QueueDepths:
        """How much waits, for any model: in all, and by tenant, of up to `limit` tenants. For people who watch."""
        ...

    async def secret(self, name: str) -> bytes:
        """32 random bytes under this name, which all processes on this store share. The first call makes them."""
        ...

    def notices(self, router: Incarnation) -> AsyncIterator[Notice]:
        """Notices of what happens to sequences attached to this router. "queued" is for those that wait again.

        The router gets notices of its own calls, too. A notice is a hint: it is lost while the connection is down, so
        a router also polls.
        """
        ...
