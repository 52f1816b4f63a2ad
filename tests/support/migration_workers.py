"""Two workers in this process that share a store, and a source that does each step of a migration as a test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from accepted import accepted_sequence
from scheduler_parts import SchedulerParts
from served_worker import admissions_of
from waiting import until

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.migration.target.migration_target import MigrationTarget
from gpu_worker.migration.transfer_service import TransferService
from gpu_worker.scheduling.block_exchange import PinnedBlocks, tail_name
from gpu_worker.scheduling.freezer import FrozenSequence
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.serving.admission.trial_queue import OwnershipAnnouncer
from gpu_worker.testing.witness_runner import WitnessRunner, witness_oracle
from octavo.internal.v1 import transfer_pb2, transfer_pb2_grpc
from octavo.net.server import make_server
from octavo.request import hashing
from octavo.request.errors import ServingError, StoreUnavailable
from octavo.request.ids import BlockHash, Incarnation, SequenceId
from octavo.request.record import Record, SequenceState
from octavo.request.sampling import SamplingParams
from octavo.store.calls import MigrateStatus, QueueLimits, TakeReason, TakeRequest
from octavo.store.memory import MemoryStore
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from octavo.wire.internal import admission_of_record
from octavo.wire.public import score_to_wire

PROMPT = tuple(range(1, 12))  # two full blocks and three tokens
BLOCK_SIZE = 4


class FlakyStore(MemoryStore):
    """A store that is away as long as a test says, or loses the answers to mig_commit."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.lost_commits = 0
        self.num_unanswered_announces = 0

    async def announce(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_unanswered_announces:
            self.num_unanswered_announces -= 1
            raise StoreUnavailable("no answer")
        return await super().announce(*args, **kwargs)

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        self._be_there()
        return await super().read(*args, **kwargs)

    async def requeue(self, *args: Any, **kwargs: Any) -> Any:
        self._be_there()
        return await super().requeue(*args, **kwargs)

    async def mig_commit(self, *args: Any, **kwargs: Any) -> Any:
        self._be_there()
        reply = await super().mig_commit(*args, **kwargs)
        if self.lost_commits:
            self.lost_commits -= 1
            raise StoreUnavailable("the answer was lost")
        return reply

    def _be_there(self) -> None:
        if self.away:
            raise StoreUnavailable("the store is away")


class MigrationWorker:
    """An engine whose WitnessRunner notices each wrong block, its journal in a store, and its migration target."""

    def __init__(self, name: str, store: MemoryStore, *, num_blocks: int = 64, step_s: float = 0.001) -> None:
        self.incarnation = Incarnation(name)
        self.store = store
        self.runner = WitnessRunner(
            block_size=BLOCK_SIZE, num_blocks=num_blocks, num_host_blocks=0, context_tokens=512, step_s=step_s
        )
        config = SchedulerConfig(max_batch_tokens=64, max_batch_sequences=8, watermark=0.0, debug=True)
        self.parts = parts = SchedulerParts(config, self.runner.info)
        self.publisher = StepPublisher()
        self.journal_writer = JournalWriter(store, self.incarnation, self.publisher, parts.port, parts.control)
        self.engine = parts.engine(self.runner, self.journal_writer.submit_soon)
        self.blocks = BlockPort(parts.port, parts.workload)
        self.admissions = admissions_of(parts, self.publisher, OwnershipAnnouncer(store, self.incarnation))
        self.watch = WorkerWatch(parts.port, parts.scheduler, parts.workload, parts.times)
        memory, listener = self.runner.block_memory, BlockListener("127.0.0.1")
        self.target = MigrationTarget(
            store, self.incarnation, self.blocks, self.admissions.admit, self.watch, memory, listener
        )

    async def start(self) -> None:
        self.task = asyncio.create_task(self.journal_writer.run())
        self.server = make_server(internal=True)
        service = TransferService()
        service.serve_target(self.target)
        transfer_pb2_grpc.add_TransferServicer_to_server(service, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = open_channel(f"127.0.0.1:{port}", internal=True)
        self.stub = transfer_pb2_grpc.TransferStub(self.channel)
        self.engine.start()

    async def close(self) -> None:
        await self.target.close()
        await self.channel.close()
        await self.server.stop(0)
        await asyncio.to_thread(self.engine.stop)
        self.task.cancel()
        assert not self.runner.mismatches, self.runner.first_mismatch

    def num_held_blocks(self) -> int:
        """The blocks that reservations have."""
        return self.parts.workload.tables.device.num_reserved

    async def recount(self) -> None:
        """Recounts all blocks and references."""
        await asyncio.wrap_future(self.engine.port.post(lambda scheduler: scheduler.check_state()))

    async def has_let_go(self, seconds: float = 5.0) -> None:
        """Waits until no ticket and no reservation is left, and recounts."""
        await until(lambda: not self.target.num_tickets and not self.num_held_blocks(), seconds)
        await self.recount()


class Move:
    """A migration from one worker to another, of which the test makes each step."""

    def __init__(self, source: MigrationWorker, target: MigrationWorker, seq_id: SequenceId) -> None:
        self.source, self.target, self.seq_id = source, target, seq_id
        self.store = source.store
        self.epoch = self.number = 1
        self.sender: BlockSender | None = None
        self.prepared: transfer_pb2.PrepareResponse | None = None
        self.num_sent = 0
        self.sends_tails = True
        self.error: Exception | None = None  # that has ended `migrate`

    async def record(self) -> Record:
        snapshot = await MemoryStore.read(self.store, self.seq_id)
        assert snapshot is not None
        return snapshot.record

    async def begin(self) -> None:
        reply = await self.store.mig_begin(self.seq_id, self.epoch, self.number, self.target.incarnation)
        assert reply.status is MigrateStatus.OK

    async def prepare(self, **changes: Any) -> transfer_pb2.PrepareResponse:
        info = self.source.runner.info
        request = transfer_pb2.PrepareRequest(
            seq_id=self.seq_id, epoch=self.epoch, number=self.number, source=self.source.incarnation,
            model_fingerprint=info.fingerprint, kv_layout=info.layout,
        )  # fmt: skip
        for field, value in changes.items():
            setattr(request, field, value)
        with statuses.serving_errors():
            prepared = await self.target.stub.Prepare(request)
        self.prepared = self.prepared or prepared
        return prepared

    async def extend(self) -> list[transfer_pb2.WantedBlock]:
        with statuses.serving_errors():
            return list((await self.target.stub.Extend(transfer_pb2.ExtendRequest(ticket=self.ticket))).wanted)

    async def finish(self, ends: Sequence[transfer_pb2.BranchEnd]) -> transfer_pb2.FinishResponse:
        with statuses.serving_errors():
            return await self.target.stub.Finish(transfer_pb2.FinishRequest(ticket=self.ticket, branches=ends))

    async def abort(self) -> None:
        with statuses.serving_errors():
            await self.target.stub.Abort(transfer_pb2.AbortRequest(ticket=self.ticket))

    @property
    def ticket(self) -> int:
        assert self.prepared is not None
        return self.prepared.ticket

    async def connect(self) -> BlockSender:
        """Opens the ticket on a connection for blocks."""
        assert self.prepared is not None
        port, secret = self.prepared.port, self.prepared.secret
        memory = self.source.runner.block_memory
        self.sender = await asyncio.to_thread(BlockSender, "127.0.0.1", port, memory, RateLimiter())
        await asyncio.wrap_future(self.sender.open_ticket(self.ticket, secret))
        return self.sender

    async def send(self, wanted: Sequence[transfer_pb2.WantedBlock]) -> None:
        sender = self.sender or await self.connect()
        pinned = await self.source.blocks.pin_blocks([BlockHash(each.hash) for each in wanted])
        try:
            blocks = [OutgoingBlock(each.index, pinned.blocks[BlockHash(each.hash)], each.hash) for each in wanted]
            await asyncio.wrap_future(sender.send_blocks(self.ticket, blocks))
            self.num_sent += len(blocks)
        finally:
            await self.source.blocks.unpin(pinned)

    async def freeze(self) -> list[transfer_pb2.BranchEnd]:
        """Stops the sequence at the source, and says where."""
        frozen, pinned = await self.source.blocks.freeze_and_pin(self.seq_id, self.epoch)
        try:
            num_computed = await self._send_tails(pinned, frozen) if self.sends_tails else {}
        finally:
            self.source.blocks.unpin_soon(pinned)
        await self.source.journal_writer.wait_until_flushed()
        log = self.source.publisher.logs[self.seq_id]
        return [
            transfer_pb2.BranchEnd(
                num_tokens=len(branch.tokens), chain=branch.chain, cumulative_logprob=end.cumulative_logprob,
                logprobs=[score_to_wire(score) for score in log.scores_of(index)],
                num_computed=num_computed.get(index, 0),
                prompt_logprobs=[] if index else [score_to_wire(score) for score in log.prompt_scores()],
            )
            for index, (branch, end) in enumerate(zip(log.branches, frozen.branches, strict=True))
        ]  # fmt: skip

    async def _send_tails(self, pinned: PinnedBlocks, frozen: FrozenSequence) -> dict[int, int]:
        """Sends the last blocks that are not full. Returns how many tokens of those branches are computed."""
        if self.prepared is None:
            return {}
        going = [index for index, branch in enumerate(frozen.branches) if not branch.finished]
        places = dict(zip(going, self.prepared.tail_indexes, strict=True))
        names = {branch: tail_name(branch) for branch in going}
        blocks = [OutgoingBlock(places[b], pinned.blocks[n], n) for b, n in names.items() if n in pinned.blocks]
        if blocks:
            sender = self.sender or await self.connect()
            await asyncio.wrap_future(sender.send_blocks(self.ticket, blocks))
            self.num_sent += len(blocks)
        return {b: frozen.branches[b].num_computed for b, name in names.items() if name in pinned.blocks}

    async def until_finish(self) -> list[transfer_pb2.BranchEnd]:
        """All that comes before Finish; returns what Finish is to say."""
        await self.begin()
        await self.send((await self.prepare()).wanted)
        ends = await self.freeze()
        await self.send(await self.extend())
        return ends

    def drop(self) -> None:
        """What a source does once it has lost the sequence."""
        if log := self.source.publisher.logs.get(self.seq_id):
            self.source.blocks.drop(log.sequence)
            self.source.publisher.forget_log(log)

    async def abort_in_store(self) -> MigrateStatus:
        """What a source does that got no answer; it runs on, or has lost the sequence."""
        reply = await self.store.mig_abort(self.seq_id, self.epoch, self.number)
        if reply.status is MigrateStatus.ABORTED:
            self.source.blocks.thaw(self.seq_id, self.epoch)
        else:
            self.drop()
        return reply.status

    async def migrate(self, call_s: float = 2.0) -> bool:
        """What a source does, with so much time for all before Finish and for Finish: whether the sequence has moved.

        As long as it has no answer to Finish, it asks the store.
        """
        try:
            ends = await asyncio.wait_for(self.until_finish(), call_s)
            await asyncio.wait_for(self.finish(ends), call_s)
        except (ServingError, TimeoutError) as error:
            self.error = error
            return await self.abort_in_store() is not MigrateStatus.ABORTED
        self.drop()
        return True

    async def runs_to_its_end(self, params: SamplingParams) -> Record:
        """Waits for the end of the sequence, wherever it runs; its output is that of an undisturbed run."""
        self.source.engine.control.grant_steps(0)

        async def ended() -> bool:
            return (await self.record()).state.ended

        await until(ended)
        record = await self.record()
        assert record.state is SequenceState.DONE
        found = await MemoryStore.read(self.store, self.seq_id, from_indexes=[0] * params.num_branches)
        info = self.source.runner.info
        root = hashing.root_key(info.fingerprint, info.layout)
        for branch, output in enumerate(found.outputs):
            assert list(output) == witness_oracle(
                PROMPT, root, params.max_tokens or 0, info=info, params=params, branch=branch
            )
        return record

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()


def long_params(**changes: Any) -> SamplingParams:
    return replace(SamplingParams(temperature=0, max_tokens=120, best_of=1, seed=1, ignore_eos=True), **changes)


@asynccontextmanager
async def migration_workers(
    params: SamplingParams, *, num_tokens: int = 9, num_blocks: int = 64, **changes: Any
) -> AsyncIterator[Move]:
    """A sequence that has so many tokens of each branch at the source, and goes on when the source may run steps."""
    store = FlakyStore()
    await store.open()
    source = MigrationWorker("source", store)
    target = MigrationWorker("target", store, num_blocks=num_blocks)
    info = source.runner.info
    new = accepted_sequence(PROMPT, params, model=info.fingerprint, layout=info.layout, **changes)
    move = Move(source, target, new.seq_id)
    await source.start()
    await target.start()
    try:
        await store.accept(new, QueueLimits())
        take = TakeRequest(new.seq_id, 0, source.incarnation, "t", TakeReason.QUEUED)
        taken = await store.take_ownership(take)
        snapshot = await MemoryStore.read(store, new.seq_id, prompt=True, from_indexes=[0] * new.num_branches)
        assert snapshot is not None
        answer = await source.admissions.admit(admission_of_record(snapshot, epoch=taken.epoch, age_ms=0), "")
        assert answer.admitted
        source.engine.control.grant_steps(num_tokens)

        async def has_tokens() -> bool:
            return min((await move.record()).num_tokens) >= num_tokens

        await until(has_tokens)
        target.engine.control.grant_steps(0)
        yield move
    finally:
        store.away = False
        move.close()
        for worker in (source, target):
            await worker.close()
