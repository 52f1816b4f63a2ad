"""The two streams of one worker. Step brings items and takes commands; Watch brings load reports and cache events."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.request.ids import Incarnation, SequenceId
from octavo.v1 import admin_pb2
from octavo.wire.internal import item_from_wire
from router.fleet.kv_index import KvChange, KvEvent, KvIndex
from router.session_registry import Assignment, SessionRegistry

WATCH_MS = 250
RESYNC_S = 0.2  # pause before a new snapshot is asked for, after a gap in the cache events
KV_CHANGES = {"stored": KvChange.STORED, "removed": KvChange.REMOVED, "cleared": KvChange.CLEARED}


@dataclass(eq=False)
class StepStream:
    """Gives the worker's items to the session registry.

    `connected` is true from the moment at which the request to open the stream is written until the stream has ended.
    """

    stub: worker_pb2_grpc.WorkerStub
    incarnation: Incarnation
    router_id: str
    sessions: SessionRegistry
    connected: bool = False
    _commands: asyncio.Queue[worker_pb2.StepRequest] = field(default_factory=asyncio.Queue)

    def follow(self, seq_id: SequenceId, next_indexes: Sequence[int]) -> None:
        """Asks for the items of a sequence, from `next_indexes` on (one per branch).

        What was asked for is lost when the stream breaks. When a new one is open, every session concerned asks again.
        """
        self._send(worker_pb2.StepRequest(follow=worker_pb2.Follow(seq_id=seq_id, next_indexes=next_indexes)))

    def unfollow(self, seq_id: SequenceId) -> None:
        """Asks the worker for no more items of that sequence. A stream that is not open brings none anyway."""
        self._send(worker_pb2.StepRequest(unfollow=worker_pb2.Unfollow(seq_id=seq_id)))

    async def read_items(self) -> None:
        """Opens the stream and reads it. Returns when the worker ended the stream; raises when the stream broke."""
        call = self.stub.Step()
        await call.write(worker_pb2.StepRequest(open=worker_pb2.Open(router_id=self.router_id)))
        await call.write(worker_pb2.StepRequest(grant=worker_pb2.Grant(steps=0)))  # the worker steps without limit
        writer = asyncio.create_task(self._write_commands(call))
        writer.add_done_callback(lambda _: call.cancel())
        try:
            self.connected = True
            self.sessions.poll_records_of_owner(self.incarnation)  # so that each session asks for its items
            while (result := await call.read()) is not grpc.aio.EOF:
                self._deliver(result)
        finally:
            self.connected = False
            self._commands = asyncio.Queue()  # what is left was for this stream
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _send(self, request: worker_pb2.StepRequest) -> None:
        if self.connected:
            self._commands.put_nowait(request)

    def _deliver(self, result: worker_pb2.StepResult) -> None:
        for message in result.items:
            item = item_from_wire(message)
            if not self.sessions.deliver_item(item):
                self.unfollow(item.seq_id)
        for moved in result.moved:  # after its items, which are the last ones from here
            assignment = Assignment(moved.epoch, Incarnation(moved.owner), follows=False, moved=True)
            self.sessions.announce_assignment(SequenceId(moved.seq_id), assignment)
        for seq_id in result.unknown_seq_ids:
            self.sessions.announce_unknown(SequenceId(seq_id), self.incarnation)

    async def _write_commands(self, call: Any) -> None:
        commands = self._commands
        while True:
            await call.write(await commands.get())


@dataclass(eq=False)
class WatchStream:
    """Gives the worker's load reports to `on_load`, and its cache events to the index."""

    stub: worker_pb2_grpc.WorkerStub
    incarnation: Incarnation
    index: KvIndex
    on_load: Callable[[admin_pb2.WorkerLoad], None]
    adapters: frozenset[str] = frozenset()  # the digests of those that the worker has, as it said last

    async def read_reports(self) -> None:
        """Opens the stream and reads it. Returns when the worker ended the stream; raises when the stream broke.

        After a gap in the cache events, the stream is opened again and begins with a new snapshot.
        """
        while True:
            call = self.stub.Watch(worker_pb2.WatchRequest(interval_ms=WATCH_MS))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    self.adapters = frozenset(message.adapters)
                    self.on_load(message.load)
                    if not self._update_index(message):
                        break
                else:
                    return
            finally:
                call.cancel()
            await asyncio.sleep(RESYNC_S)

    def _update_index(self, message: worker_pb2.WatchResponse) -> bool:
        """Brings the index up to the message. Returns whether it is: if not, the next snapshot will do that."""
        if message.HasField("snapshot"):
            snapshot = message.snapshot
            device, host = snapshot.device_hashes, snapshot.host_hashes
            self.index.apply_snapshot(self.incarnation, device, host, message.event_seq)
        else:
            events = list(map(_event, message.events))
            if not self.index.apply_events(self.incarnation, events, message.event_seq, message.digest):
                return False
        self.index.apply_file_events(self.incarnation, list(map(_event, message.file_events)))
        return True


def _event(message: worker_pb2.KvEvent) -> KvEvent:
    return KvEvent(KV_CHANGES[message.WhichOneof("event")], message.stored or message.removed)
