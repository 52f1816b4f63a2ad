"""The two streams of one worker: Step brings items and takes commands, Watch says how it is and what it has cached."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from octavo.ids import Incarnation, SequenceId
from octavo.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.kv_index import ApplyOutcome, KvChange, KvEvent, KvIndex
from router.session_registry import SessionRegistry

WATCH_MS = 250
RESYNC_S = 0.2  # after a gap in the cache events
KV_CHANGES = {"stored": KvChange.STORED, "removed": KvChange.REMOVED, "cleared": KvChange.CLEARED}


class StepStream:
    """What it brings is handed to the session registry. `connected` while it is open."""

    def __init__(
        self, stub: worker_pb2_grpc.WorkerStub, incarnation: Incarnation, router_id: str, sessions: SessionRegistry
    ) -> None:
        self.connected = False
        self._stub = stub
        self._incarnation = incarnation
        self._router_id = router_id
        self._sessions = sessions
        self._commands: asyncio.Queue[worker_pb2.StepRequest] = asyncio.Queue()

    def follow(self, seq_id: SequenceId, next_indexes: Sequence[int]) -> None:
        """Asks for the items from there on. Lost when the stream breaks: every session is told of a new one."""
        follow = worker_pb2.Follow(seq_id=seq_id, next_indexes=next_indexes)
        self._commands.put_nowait(worker_pb2.StepRequest(follow=follow))

    def unfollow(self, seq_id: SequenceId) -> None:
        self._commands.put_nowait(worker_pb2.StepRequest(unfollow=worker_pb2.Unfollow(seq_id=seq_id)))

    async def run(self) -> None:
        """Returns when it has ended; raises when it broke."""
        call = self._stub.Step()
        await call.write(worker_pb2.StepRequest(open=worker_pb2.Open(router_id=self._router_id)))
        await call.write(worker_pb2.StepRequest(grant=worker_pb2.Grant(steps=0)))
        self._commands = asyncio.Queue()  # what was said to an older stream is void
        writer = asyncio.create_task(self._write_commands(call))
        writer.add_done_callback(lambda _: call.cancel())
        try:
            self.connected = True
            self._sessions.check_owned(self._incarnation)  # each session says where it is
            while (result := await call.read()) is not grpc.aio.EOF:
                self._hand_on(result)
        finally:
            self.connected = False
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _hand_on(self, result: worker_pb2.StepResult) -> None:
        deliver = self._sessions.deliver
        for item in result.items:
            if not deliver(SequenceId(item.seq_id), item):
                self.unfollow(SequenceId(item.seq_id))
        for seq_id in result.unknown_seq_ids:
            self._sessions.unknown(SequenceId(seq_id), self._incarnation)

    async def _write_commands(self, call: Any) -> None:
        commands = self._commands
        while True:
            await call.write(await commands.get())


class WatchStream:
    """Load goes to `on_load`, cache events into the index."""

    def __init__(
        self,
        stub: worker_pb2_grpc.WorkerStub,
        incarnation: Incarnation,
        index: KvIndex,
        on_load: Callable[[worker_pb2.Load], None],
    ) -> None:
        self._stub = stub
        self._incarnation = incarnation
        self._index = index
        self._on_load = on_load

    async def run(self) -> None:
        """Returns when it has ended; raises when it broke. After a gap it goes on from a new snapshot."""
        while True:
            call = self._stub.Watch(worker_pb2.WatchRequest(interval_ms=WATCH_MS))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._on_load(message.load)
                    if not self._update_index(message):
                        break
                else:
                    return
            finally:
                call.cancel()
            await asyncio.sleep(RESYNC_S)

    def _update_index(self, message: worker_pb2.WatchResponse) -> bool:
        if message.HasField("snapshot"):
            snapshot = message.snapshot
            self._index.apply_snapshot(
                self._incarnation, snapshot.device_hashes, snapshot.host_hashes, message.event_seq
            )
            return True
        events = [
            KvEvent(KV_CHANGES[event.WhichOneof("event")], event.stored or event.removed) for event in message.events
        ]
        return self._index.apply(self._incarnation, events, message.event_seq, message.digest) is ApplyOutcome.OK
