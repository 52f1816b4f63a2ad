"""What the store has of a sequence that is about to come, as far as the target has read it."""

import time
from collections.abc import Sequence

from gpu_worker.migration.calls.transfer_calls import BranchEnd, MigrationRequest
from octavo.request import hashing
from octavo.request.errors import CannotMove, InvalidArgument, NotFound
from octavo.request.ids import Incarnation
from octavo.request.record import Admission, Record, SequenceState, Snapshot
from octavo.store.base import Store
from octavo.wire.internal import admission_of_record


class IncomingHistory:
    """The record, the prompt and the journals of a sequence. Each read adds what the journals have got since.

    Every read raises CannotMove unless the record says that this migration to this target is under way.
    """

    def __init__(self, store: Store, request: MigrationRequest, target: Incarnation) -> None:
        self._store = store
        self._request = request
        self._target = target
        self._prompt: tuple[int, ...] = ()
        self._outputs: list[list[int]] = []
        self._chains: list[int] = []
        self._snapshot: Snapshot | None = None
        self._read_at = 0.0

    @property
    def record(self) -> Record:
        return self._known.record

    @property
    def num_tokens(self) -> list[int]:
        """How many tokens of each branch have been read."""
        return [len(output) for output in self._outputs]

    @property
    def _known(self) -> Snapshot:
        if self._snapshot is None:
            raise CannotMove("its record has not been read", cause="journal")
        return self._snapshot

    async def read_all(self) -> None:
        """Reads prompt and journals for the first time. Raises NotFound, CannotMove or StoreUnavailable."""
        first = await self._store.read(self._request.seq_id, prompt=True)
        self._require_migration(first)
        if first is not None:
            self._prompt = first.prompt
            self._outputs = [[] for _ in range(first.record.num_branches)]
            self._chains = [hashing.prompt_chain(first.prompt)] * first.record.num_branches
        await self.read_more()

    async def read_more(self) -> None:
        """Reads what the journals have got since the last read. Raises NotFound, CannotMove or StoreUnavailable."""
        self._read_at = time.monotonic()
        snapshot = self._require_migration(await self._store.read(self._request.seq_id, from_indexes=self.num_tokens))
        for branch, more in enumerate(snapshot.outputs):
            self._outputs[branch] += more
            self._chains[branch] = hashing.extend_chain(self._chains[branch], more)
        self._snapshot = snapshot

    def admission(self, epoch: int) -> Admission:
        """The admission by which the target runs the sequence, once it owns that epoch."""
        known = self._known
        whole = Snapshot(known.record, self._prompt, tuple(map(tuple, self._outputs)), known.now_ms)
        age_ms = int(1000 * (time.monotonic() - self._read_at))
        return admission_of_record(whole, epoch=epoch, age_ms=age_ms)

    def require_ends(self, ends: Sequence[BranchEnd], block_size: int) -> None:
        """Raises InvalidArgument or CannotMove unless the journals have exactly the tokens that the source has.

        A tail begins after the last full block, and does not have the last token, which is still to be run.

        A branch that has ended for the store does not move: how much of it the source has seen does not matter.
        """
        record = self.record
        if len(ends) != record.num_branches:
            raise InvalidArgument("branches", f"{len(ends)} are named; the record has {record.num_branches}")
        for branch, (end, finish) in enumerate(zip(ends, record.finishes, strict=True)):
            if finish:
                continue
            where, num_tokens = f"branch {branch} of sequence {record.seq_id}", len(self._outputs[branch])
            if num_tokens != end.num_tokens:
                text = f"{where}: the journal has {num_tokens} tokens, the source stopped at {end.num_tokens}"
                raise CannotMove(text, cause="journal")
            if self._chains[branch] != end.chain:
                raise CannotMove(f"{where}: the journal does not have the tokens of the source", cause="journal")
            most = len(self._prompt) + num_tokens - 1
            full = most - most % block_size
            if end.num_computed and not full <= end.num_computed <= most:
                text = f"{where}: {end.num_computed} is not a number from {full} to {most}"
                raise InvalidArgument("branches.num_computed", text)

    def _require_migration(self, snapshot: Snapshot | None) -> Snapshot:
        request = self._request
        name = f"sequence {request.seq_id}"
        if snapshot is None:
            raise NotFound(f"{name}: there is no such record", resource="sequence", name=request.seq_id)
        record = snapshot.record
        if record.state.ended:
            raise CannotMove(f"{name} has ended", cause="ended")
        if record.epoch != request.epoch or record.state is not SequenceState.RUNNING:
            raise CannotMove(f"{name} is {record.state} at epoch {record.epoch}, not {request.epoch}", cause="epoch")
        if record.owner != request.source:
            raise CannotMove(f"{name} is owned by {record.owner}, not by {request.source}", cause="owner")
        if record.mig_number != request.number:
            text = f"{name}: the store knows migration {record.mig_number}, not {request.number}"
            raise CannotMove(text, cause="number")
        if record.mig_to != self._target:
            raise CannotMove(f"{name} moves to {record.mig_to or 'no worker'}, not here", cause="target")
        return snapshot
