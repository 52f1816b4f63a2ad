"""The Transfer service: what other workers call when a sequence moves here, or when they lack blocks."""

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from gpu_worker.engine.adapter_files import FilePiece
from gpu_worker.migration.blocks.frames import SECRET_BYTES
from gpu_worker.migration.calls.standby_calls import (
    MOST_HISTORIES,
    MOST_NAMED,
    MOST_SENT_BYTES,
    HistoryState,
    NamedHistory,
    StandbyRequest,
    block_checksum,
)
from gpu_worker.migration.calls.transfer_calls import (
    HASH_BYTES,
    BranchEnd,
    FetchRequest,
    MigrationRequest,
    wanted_to_wire,
)
from gpu_worker.migration.prefix.block_supplier import MOST_WANTED, BlockSupplier
from gpu_worker.migration.standby.standby_buddy import StandbyBuddy
from gpu_worker.migration.target.migration_target import MigrationTarget
from gpu_worker.scheduling.block_exchange import WantedBlock
from gpu_worker.scheduling.standby_blocks import SentBlock
from octavo.internal.v1 import transfer_pb2, transfer_pb2_grpc
from octavo.request import limits, validation
from octavo.request.errors import CannotMove, InvalidArgument, Loading
from octavo.request.ids import BlockHash, Incarnation
from octavo.wire.public import score_from_wire

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[object, object]

LOADING_RETRY_MS = 1000


class TransferService(transfer_pb2_grpc.TransferServicer):
    """Calls are answered Loading until `serve_target` has been called."""

    def __init__(self) -> None:
        self._served: MigrationTarget | None = None
        self._supplier: BlockSupplier | None = None
        self._buddy: StandbyBuddy | None = None

    def serve_target(
        self, target: MigrationTarget, supplier: BlockSupplier | None = None, buddy: StandbyBuddy | None = None
    ) -> None:
        """Lets this target answer calls from now on. Without a supplier, blocks come here and none is fetched; without
        a buddy no standby is kept here.
        """
        self._served, self._supplier, self._buddy = target, supplier, buddy

    @property
    def _target(self) -> MigrationTarget:
        if self._served is None:
            raise loading()
        return self._served

    async def Prepare(self, request: transfer_pb2.PrepareRequest, context: "Context") -> transfer_pb2.PrepareResponse:
        reservation = await self._target.prepare(request_from_wire(request))
        return transfer_pb2.PrepareResponse(
            ticket=reservation.ticket,
            secret=reservation.secret,
            ttl_ms=reservation.ttl_ms,
            port=reservation.port,
            wanted=map(wanted_to_wire, reservation.wanted),
            num_blocks=reservation.num_blocks,
            tail_indexes=reservation.tail_indexes,
        )

    async def Extend(self, request: transfer_pb2.ExtendRequest, context: "Context") -> transfer_pb2.ExtendResponse:
        wanted = await self._target.extend(request.ticket)
        return transfer_pb2.ExtendResponse(wanted=map(wanted_to_wire, wanted))

    async def Finish(self, request: transfer_pb2.FinishRequest, context: "Context") -> transfer_pb2.FinishResponse:
        finished = await self._target.finish(request.ticket, [end_from_wire(end) for end in request.branches])
        return transfer_pb2.FinishResponse(epoch=finished.epoch, num_blocks=finished.num_blocks)

    async def Abort(self, request: transfer_pb2.AbortRequest, context: "Context") -> transfer_pb2.AbortResponse:
        await self._target.abort(request.ticket)
        return transfer_pb2.AbortResponse()

    async def GiveAdapter(
        self, requests: AsyncIterator[transfer_pb2.GiveAdapterRequest], context: "Context"
    ) -> transfer_pb2.GiveAdapterResponse:
        target, first = self._target, await anext(requests, None)
        if first is None or not first.digest:
            raise InvalidArgument("digest", "is empty: name the adapter in the first message")
        validation.validate_adapter(first.digest, "given")
        pieces = (FilePiece(each.name, each.data) async for each in requests)
        await target.take_adapter(first.digest, first.model_fingerprint, pieces)
        return transfer_pb2.GiveAdapterResponse()

    async def Fetch(self, request: transfer_pb2.FetchRequest, context: "Context") -> transfer_pb2.FetchResponse:
        supplier = self._required_supplier()
        return transfer_pb2.FetchResponse(num_blocks=await supplier.send_blocks(fetch_from_wire(request)))

    async def ListHot(self, request: transfer_pb2.ListHotRequest, context: "Context") -> transfer_pb2.ListHotResponse:
        supplier = self._required_supplier()
        hashes = await supplier.list_hot(request.model_fingerprint, request.kv_layout, request.numerics, request.limit)
        return transfer_pb2.ListHotResponse(hashes=b"".join(hashes))

    async def Standby(self, request: transfer_pb2.StandbyRequest, context: "Context") -> transfer_pb2.StandbyResponse:
        if self._served is None:
            raise loading()
        if self._buddy is None:
            raise CannotMove("this worker keeps no standbys: --standby is off here", cause="runner")
        return states_to_wire(await self._buddy.note_histories(standby_from_wire(request)))

    def _required_supplier(self) -> BlockSupplier:
        if self._served is None:
            raise loading()
        if self._supplier is None:
            raise CannotMove("this worker sends no blocks to others: compute the tokens", cause="runner")
        return self._supplier


def loading() -> Loading:
    return Loading("this worker has not started yet: ask it later", retry_after_ms=LOADING_RETRY_MS)


def request_from_wire(message: transfer_pb2.PrepareRequest) -> MigrationRequest:
    """The request. Raises InvalidArgument if a field cannot be right in any store."""
    for field, value in (("epoch", message.epoch), ("number", message.number)):
        if not 1 <= value <= limits.U64_MAX:
            raise InvalidArgument(field, f"{value} is not a number from 1 on")
    if not message.source:
        raise InvalidArgument("source", "is empty: name the incarnation that owns the sequence")
    return MigrationRequest(
        validation.validate_sequence_id("seq_id", message.seq_id),
        message.epoch,
        message.number,
        Incarnation(message.source),
        message.model_fingerprint,
        message.kv_layout,
        message.numerics,
    )


def fetch_from_wire(message: transfer_pb2.FetchRequest) -> FetchRequest:
    """The request. Raises InvalidArgument if it names no blocks, too many of them, or no ticket."""
    if not 0 < len(message.wanted) <= MOST_WANTED:
        raise InvalidArgument("wanted", f"has {len(message.wanted)} blocks, not 1 to {MOST_WANTED}")
    wanted = [WantedBlock(each.index, BlockHash(each.hash)) for each in message.wanted]
    if any(len(each.block_hash) != HASH_BYTES for each in wanted) or len({w.index for w in wanted}) != len(wanted):
        raise InvalidArgument("wanted", f"each block has an index of its own and a hash of {HASH_BYTES} bytes")
    if len(message.secret) != SECRET_BYTES:
        raise InvalidArgument("secret", f"has {len(message.secret)} bytes, not {SECRET_BYTES}")
    if not 0 < message.port < 2**16:
        raise InvalidArgument("port", f"{message.port} is no port")
    if not message.target:
        raise InvalidArgument("target", "is empty: name the incarnation of the worker that asks")
    return FetchRequest(
        Incarnation(message.target),
        message.model_fingerprint,
        message.kv_layout,
        message.ticket,
        message.secret,
        message.port,
        wanted,
        message.numerics,
        message.standby,
    )


def end_from_wire(message: transfer_pb2.BranchEnd) -> BranchEnd:
    return BranchEnd(
        message.num_tokens,
        message.chain,
        message.cumulative_logprob,
        tuple(map(score_from_wire, message.logprobs)),
        message.num_computed,
        tuple(map(score_from_wire, message.prompt_logprobs)),
    )


def standby_from_wire(message: transfer_pb2.StandbyRequest) -> StandbyRequest:
    """The request. Raises InvalidArgument if it names no owner, too much, a branch twice, or hashes that are none."""
    if not message.owner:
        raise InvalidArgument("owner", "is empty: name the incarnation of the worker that runs the sequences")
    if len(message.histories) > MOST_HISTORIES:
        raise InvalidArgument("histories", f"{len(message.histories)} are too many; at most {MOST_HISTORIES}")
    if sum(len(each.hashes) for each in message.histories) > MOST_NAMED * HASH_BYTES:
        raise InvalidArgument("histories", f"they name too many blocks; at most {MOST_NAMED} in a call")
    _check_sent(message.histories)
    histories = [_history_from_wire(f"histories[{index}]", each) for index, each in enumerate(message.histories)]
    if len({(each.seq_id, each.branch) for each in histories}) != len(histories):
        raise InvalidArgument("histories", "one branch is named twice: name each once")
    return StandbyRequest(
        Incarnation(message.owner),
        message.model_fingerprint,
        message.kv_layout,
        message.numerics,
        histories,
        message.number,
    )


def _check_sent(histories: Iterable[transfer_pb2.NamedHistory]) -> None:
    """Raises InvalidArgument with the block that is too much: no more is read, summed or kept of a call."""
    num_bytes = 0
    for index, each in enumerate(histories):
        fields = [(f"blocks[{number}]", block) for number, block in enumerate(each.blocks)]
        for field, block in [*fields, ("tail", each.tail)]:
            num_bytes += len(block.content)
            if num_bytes > MOST_SENT_BYTES:
                told = (
                    f"up to here the blocks of this call have {num_bytes} bytes, of {MOST_SENT_BYTES}: name it without"
                )
                raise InvalidArgument(f"histories[{index}].{field}.content", told)


def _history_from_wire(field: str, message: transfer_pb2.NamedHistory) -> NamedHistory:
    if message.branch >= limits.MAX_N:
        raise InvalidArgument(f"{field}.branch", f"{message.branch}: a sequence has at most {limits.MAX_N} branches")
    if len(message.hashes) % HASH_BYTES:
        raise InvalidArgument(f"{field}.hashes", f"{len(message.hashes)} bytes: a hash has {HASH_BYTES}")
    seq_id = validation.validate_sequence_id(f"{field}.seq_id", message.seq_id)
    starts = range(0, len(message.hashes), HASH_BYTES)
    hashes = [BlockHash(message.hashes[start : start + HASH_BYTES]) for start in starts]
    blocks = [_sent_from_wire(f"{field}.blocks[{index}]", each) for index, each in enumerate(message.blocks)]
    if [each.name for each in blocks] != hashes[len(hashes) - len(blocks) :]:
        raise InvalidArgument(f"{field}.blocks", "are not the last ones of `hashes`: send those, in their order")
    tail = _sent_from_wire(f"{field}.tail", message.tail) if message.HasField("tail") else None
    return NamedHistory(seq_id, message.branch, message.first, hashes, blocks, tail)


def _sent_from_wire(field: str, message: transfer_pb2.SentBlock) -> SentBlock:
    if len(message.hash) != HASH_BYTES:
        raise InvalidArgument(f"{field}.hash", f"{len(message.hash)} bytes: a hash has {HASH_BYTES}")
    block = SentBlock(BlockHash(message.hash), message.content)
    if block_checksum(block) != message.checksum:
        raise InvalidArgument(f"{field}.content", "its checksum is wrong: send the block again")
    return block


def states_to_wire(states: list[HistoryState]) -> transfer_pb2.StandbyResponse:
    return transfer_pb2.StandbyResponse(
        states=[
            transfer_pb2.HistoryState(num_named=each.num_named, num_held=each.num_held, refused=each.refused)
            for each in states
        ]
    )
