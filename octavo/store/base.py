"""The interface of the store. docs/protocol-reference.md says all that each function promises, and why.

`octavo.store.memory` defines the functions on plain values; `octavo.store.redis` is the store for production.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Protocol

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import NewSequence, Record, Snapshot
from octavo.store import calls


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
    async def accept(self, new: NewSequence, limits: calls.QueueLimits) -> calls.AcceptReply:
        """Writes the record at epoch 0 and queues the sequence. A router calls `heartbeat` before. Raises StoreFull."""
        ...

    async def accepting(self) -> bool:
        """Whether the store has memory for a new request: if not, `accept` raises StoreFull."""
        ...

    async def pop(self, model: str, count: int, claim_ms: int, places: int = 0, most_kept: int = 0) -> list[Snapshot]:
        """The first sequences in the queue of a model (its fingerprint), whole, and claimed for `claim_ms`.

        Of the `places` that workers have left, up to `most_kept` are kept for tenants that had less than their share.
        """
        ...

    async def requeue(self, seq_id: SequenceId, epoch: int, seen: str = "") -> bool:
        """Puts a popped or running sequence back at its old place, at epoch + 1 if it ran; whether it waits now.

        `seen` says in a few words why; the timeline of one that ran has it.
        """
        ...

    async def take_ownership(self, request: calls.TakeRequest) -> calls.TakeReply:
        """Makes a worker the owner at epoch + 1."""
        ...

    async def announce(self, seq_id: SequenceId, epoch: int, owner: Incarnation) -> bool:
        """Notes that the owner of this epoch is about to run a sequence, if that is a suspect.

        Returns whether this worker is that owner; if not, it must not run the sequence.
        """
        ...

    async def append_batch(self, owner: Incarnation, items: Sequence[calls.AppendItem]) -> list[calls.AppendReply]:
        """Appends tokens to journals on behalf of their owner, in the order of the items; one reply per item.

        Two calls at once may arrive in either order: a worker sends the next item of a branch after the last reply.
        """
        ...

    async def note_progress(
        self, seq_id: SequenceId, epoch: int, owner: Incarnation, num_tokens: int
    ) -> calls.AppendStatus:
        """Notes output tokens that the owner has computed since the take and that reach the journal at their end."""
        ...

    async def finish(self, finish: calls.Finish) -> bool:
        """Ends one branch, or every branch that still runs; whether one of the branches has this reason now."""
        ...

    async def read(
        self, seq_id: SequenceId, *, prompt: bool = False, from_indexes: Sequence[int] | None = None
    ) -> Snapshot | None:
        """The record; with `prompt`, its prompt, too; with `from_indexes`, one per branch, its journals from there."""
        ...

    async def read_notes(self, seq_id: SequenceId) -> bytes:
        """What the endpoint that took the request has written down beside the record; empty if it has not."""
        ...

    async def keep_picture(self, seq_id: SequenceId, digest: str, pixels: bytes) -> bool:
        """Keeps a picture for a sequence that is about to be accepted; false if the sequence is there already.

        It is kept for a minute, and once the sequence is accepted, as long as its prompt.
        """
        ...

    async def read_picture(self, seq_id: SequenceId, digest: str) -> bytes:
        """The pixels of a picture of the sequence; empty if it is not kept."""
        ...

    async def forget(self, seq_id: SequenceId) -> bool:
        """Drops an ended sequence before its time; false if it has not ended yet."""
        ...

    async def cancel(self, seq_id: SequenceId) -> Record | None:
        """Ends a waiting sequence, tells the owner of a running one at its next append; the record after that."""
        ...

    async def attach(self, seq_id: SequenceId, router: Incarnation) -> Record | None:
        """Adds this router to those that get notices of the sequence, as it has a client; the record after that."""
        ...

    async def detach(self, seq_id: SequenceId, router: Incarnation) -> None:
        """Notes that the client has left this router. Others may still be attached."""
        ...

    # Migration
    async def mig_begin(self, seq_id: SequenceId, epoch: int, number: int, target: Incarnation) -> calls.MigrateReply:
        """Notes in the record that the sequence moves to `target`, by a number higher than before at this epoch."""
        ...

    async def mig_commit(
        self, seq_id: SequenceId, epoch: int, number: int, target: Incarnation, num_tokens: Sequence[int]
    ) -> calls.MigrateReply:
        """Makes the target the owner at epoch + 1, if each journal is as long as `num_tokens` says."""
        ...

    async def mig_abort(self, seq_id: SequenceId, epoch: int, number: int) -> calls.MigrateReply:
        """Ends the migration of this number without a new owner, even if its begin arrives later.

        Of commit and abort of one number, only the first one takes effect.
        """
        ...

    # Members and housekeeping
    async def register(self, member: calls.Member, lease_ms: int) -> calls.NameHolder | None:
        """Gives a member that starts its name, and no lease; if another one at another endpoint has it, which."""
        ...

    async def heartbeat(self, member: calls.Member, lease_ms: int) -> calls.Renewal:
        """Renews the member's lease, its description, and its hold on its name, unless another one has it by now."""
        ...

    async def hold_lifeline(self, worker: Incarnation, on_held: Callable[[], None]) -> None:
        """Keeps a connection open by which the store sees at once that this process has died, until it is cancelled.

        Only together with a router's word it speaks against a worker: it may break while the worker lives. `on_held` is
        called whenever it is there anew; it counts from the next heartbeat on.
        """
        ...

    async def leave(self, member: calls.Member) -> None:
        """Ends lease and hold at once. What the worker still owns may be taken, and such a take counts no crash."""
        ...

    async def members(self, kind: str) -> list[calls.Member]:
        """The members of one kind whose lease runs, in the order of their ids."""
        ...

    async def note_limits(self, seen: Collection[calls.WorkerLimits], kept_ms: int) -> list[calls.WorkerLimits]:
        """Remembers that workers with these limits are there; the limits of all that were within `kept_ms`."""
        ...

    async def sweep(self, limit: int, grace_ms: int, interval_ms: int = 0) -> calls.SweepReport:
        """Housekeeping that every router does for all: up to `limit` sequences of each kind of work.

        A call less than the last one's `interval_ms` after it does nothing.
        """
        ...

    async def list_sequences(self, owner: Incarnation | None, limit: int) -> list[Record]:
        """Up to `limit` live sequences of one owner, or of all owners, in no particular order."""
        ...

    async def owned(self, owner: Incarnation, besides: Collection[SequenceId] = ()) -> list[calls.OwnedSequence]:
        """What a worker owns by the records besides these sequences, in the order of the queue."""
        ...

    async def queue_depth(self) -> calls.QueueDepth:
        """How much waits, for any model."""
        ...

    async def model_depths(self) -> dict[str, calls.QueueDepth]:
        """How much waits, by the fingerprint of the model. Models of which nothing waits are left out."""
        ...

    async def tenant_depths(self, limit: int) -> calls.QueueDepths:
        """How much waits, for any model: in all, and by tenant, of up to `limit` tenants. For people who watch."""
        ...

    async def describe_model(self, name: str, description: bytes) -> None:
        """Keeps what a router knows of the model of that name, for months. The last description counts."""
        ...

    async def model_descriptions(self) -> dict[str, bytes]:
        """The descriptions that are kept, by the names of the models."""
        ...

    async def put_prefix(self, key: str, value: bytes, most: int) -> bool:
        """Keeps a prefix that an operator has named, until it is dropped. False: there are `most` others already."""
        ...

    async def drop_prefix(self, key: str) -> bool:
        """Whether it was there."""
        ...

    async def prefixes(self) -> dict[str, bytes]:
        """All that were put and not dropped, by their keys."""
        ...

    async def put_adapter(self, key: str, value: bytes, most: int) -> bool:
        """Keeps an adapter that an operator has named, until it is dropped. False: there are `most` others already."""
        ...

    async def drop_adapter(self, key: str) -> bool:
        """Whether it was there."""
        ...

    async def adapters(self) -> dict[str, bytes]:
        """All that were put and not dropped, by their keys."""
        ...

    async def secret(self, name: str) -> bytes:
        """32 random bytes under this name, which all processes on this store share. The first call makes them."""
        ...

    def notices(self, router: Incarnation) -> AsyncIterator[calls.Notice]:
        """Hints of what happens to sequences attached to this router, also by its own calls.

        They are lost while the connection is down, so a router also polls.
        """
        ...
