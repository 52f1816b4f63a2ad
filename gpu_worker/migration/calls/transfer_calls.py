"""The calls of Transfer as plain values, and how a worker makes them on another one.

A call raises a ServingError: what the target has answered, or Unreachable where no answer came in time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from gpu_worker.engine.adapter_files import FilePiece
from gpu_worker.migration.blocks.frames import SECRET_BYTES
from gpu_worker.migration.calls.standby_calls import HistoryState, StandbyRequest, block_checksum
from gpu_worker.scheduling.block_exchange import WantedBlock
from gpu_worker.scheduling.standby_blocks import SentBlock
from gpu_worker.steps.runner import RunnerInfo
from octavo.internal.v1 import transfer_pb2, transfer_pb2_grpc
from octavo.request.errors import DeadlineExceeded, Mismatch, Unreachable
from octavo.request.ids import BlockHash, Incarnation, SequenceId
from octavo.request.sampling import TokenScore
from octavo.wire import statuses
from octavo.wire.public import score_to_wire

T = TypeVar("T")
HASH_BYTES = 16
PREPARE_S = 2.0  # the target reads the record, and its engine ends a step before it reserves
EXTEND_S = 2.0
ABORT_S = 1.0
GIVE_S = 60.0  # files of an adapter, at most some gigabytes
STANDBY_S = 2.0


@dataclass(frozen=True, slots=True)
class MigrationRequest:
    """Asks a target to prepare for a sequence: a migration that has begun in the store, and what its source has."""

    seq_id: SequenceId
    epoch: int  # at the source
    number: int  # of the migration in the record
    source: Incarnation
    fingerprint: str  # of the source's model
    layout: str  # of a block there
    numerics: str = ""  # its class of numerics

    @property
    def key(self) -> tuple[SequenceId, int, int]:
        """What names the migration."""
        return self.seq_id, self.epoch, self.number


@dataclass(frozen=True, slots=True)
class MigrationReservation:
    """What a target holds for a sequence: a ticket on its listener for blocks, and the blocks that it lacks."""

    ticket: int
    secret: bytes
    ttl_ms: int  # after which a ticket ends without a call of it, or a block on its connection
    port: int
    wanted: list[WantedBlock]  # their indexes are those in the ticket
    num_blocks: int  # full blocks of the sequence
    tail_indexes: tuple[int, ...] = ()  # in the ticket, of the tails of the branches that go on for the target


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks another worker for blocks of its prefix cache, on a ticket of the worker that asks."""

    target: Incarnation  # the worker that asks
    fingerprint: str  # of its model
    layout: str  # of a block there
    ticket: int
    secret: bytes
    port: int
    wanted: list[WantedBlock]  # in the order of their prefix
    numerics: str = ""  # its class of numerics
    standby: bool = False  # no sequence waits for the blocks


@dataclass(frozen=True, slots=True)
class BranchEnd:
    """Where a branch stopped at the source."""

    num_tokens: int
    chain: int
    cumulative_logprob: float = 0.0
    scores: tuple[TokenScore, ...] = ()  # of its tokens, if the request asks for them
    num_computed: int = 0  # tokens of prompt and output in its full blocks and in the tail that was sent; 0: none was
    prompt_scores: tuple[TokenScore, ...] = ()  # of prompt[1:], with the first branch, if the request asks for them


@dataclass(frozen=True, slots=True)
class FinishedMigration:
    """What a target answers once it owns the sequence."""

    epoch: int
    num_blocks: int  # that arrived for it


class TransferClient:
    """The Transfer service of one other worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = transfer_pb2_grpc.TransferStub(channel)

    async def prepare(self, request: MigrationRequest) -> MigrationReservation:
        """Asks for a reservation, and once more if the answer is lost: the target gives the same ticket."""
        message = transfer_pb2.PrepareRequest(
            seq_id=request.seq_id,
            epoch=request.epoch,
            number=request.number,
            source=request.source,
            model_fingerprint=request.fingerprint,
            kv_layout=request.layout,
            numerics=request.numerics,
        )
        answer = await asked_twice("Prepare", lambda: self._stub.Prepare(message, timeout=PREPARE_S))
        if len(answer.secret) != SECRET_BYTES or not 0 < answer.port < 2**16:
            raise Mismatch("the target answered Prepare without a secret and a port: it runs another version")
        wanted = wanted_from_wire(answer.wanted)
        tails = tuple(answer.tail_indexes)
        if len({*tails, *(each.index for each in wanted)}) != len(tails) + len(wanted):
            raise Mismatch("the target wants two blocks at one index: it runs another version")
        return MigrationReservation(
            answer.ticket, answer.secret, answer.ttl_ms, answer.port, wanted, answer.num_blocks, tails
        )

    async def give_adapter(self, digest: str, fingerprint: str, pieces: Iterator[FilePiece]) -> None:
        """Sends the files of an adapter, so that the target has it in memory."""

        async def messages() -> AsyncIterator[transfer_pb2.GiveAdapterRequest]:
            yield transfer_pb2.GiveAdapterRequest(digest=digest, model_fingerprint=fingerprint)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield transfer_pb2.GiveAdapterRequest(name=piece.name, data=piece.data)

        with in_time("GiveAdapter"):
            await self._stub.GiveAdapter(messages(), timeout=GIVE_S)

    async def extend(self, ticket: int) -> list[WantedBlock]:
        """Reserves blocks for the tokens that the journals have got since.

        Returns all blocks that are still to be sent. Asks once more if the answer is lost: the target names the same
        blocks again.
        """
        message = transfer_pb2.ExtendRequest(ticket=ticket)
        answer = await asked_twice("Extend", lambda: self._stub.Extend(message, timeout=EXTEND_S))
        return wanted_from_wire(answer.wanted)

    async def finish(self, ticket: int, ends: Iterable[BranchEnd], timeout_s: float) -> FinishedMigration:
        """Makes the target the owner. After an error the store knows what has happened."""
        branches = [
            transfer_pb2.BranchEnd(
                num_tokens=end.num_tokens,
                chain=end.chain,
                cumulative_logprob=end.cumulative_logprob,
                logprobs=map(score_to_wire, end.scores),
                num_computed=end.num_computed,
                prompt_logprobs=map(score_to_wire, end.prompt_scores),
            )
            for end in ends
        ]
        with in_time("Finish"):
            answer = await self._stub.Finish(
                transfer_pb2.FinishRequest(ticket=ticket, branches=branches), timeout=timeout_s
            )
        return FinishedMigration(answer.epoch, answer.num_blocks)

    async def fetch(self, request: FetchRequest, timeout_s: float) -> int:
        """Asks for blocks. Returns how many of the leading ones have been sent, by what the other worker says."""
        message = transfer_pb2.FetchRequest(
            target=request.target,
            model_fingerprint=request.fingerprint,
            kv_layout=request.layout,
            ticket=request.ticket,
            secret=request.secret,
            port=request.port,
            wanted=map(wanted_to_wire, request.wanted),
            numerics=request.numerics,
            standby=request.standby,
        )
        with in_time("Fetch"):
            answer = await self._stub.Fetch(message, timeout=timeout_s)
        return int(answer.num_blocks)

    async def list_hot(
        self, fingerprint: str, layout: str, numerics: str, limit: int, timeout_s: float
    ) -> list[BlockHash]:
        """The other worker's blocks that are in use, the most shared first, then those used last.

        Each comes before those that continue it.
        """
        message = transfer_pb2.ListHotRequest(
            model_fingerprint=fingerprint, kv_layout=layout, limit=limit, numerics=numerics
        )
        with in_time("ListHot"):
            hashes = (await self._stub.ListHot(message, timeout=timeout_s)).hashes
        if len(hashes) % HASH_BYTES:
            raise Mismatch("the other worker lists hashes that are none: it runs another version")
        return [BlockHash(hashes[start : start + HASH_BYTES]) for start in range(0, len(hashes), HASH_BYTES)][:limit]

    async def standby(self, request: StandbyRequest) -> list[HistoryState]:
        """Names all histories that the other worker is to keep. Returns what it has of each, in order."""
        with in_time("Standby"):
            answer = await self._stub.Standby(standby_to_wire(request), timeout=STANDBY_S)
        if len(answer.states) != len(request.histories):
            raise Mismatch("the buddy has not answered for each history: it runs another version")
        return [HistoryState(each.num_named, each.num_held, each.refused) for each in answer.states]

    async def abort(self, ticket: int) -> None:
        """Ends a ticket."""
        with in_time("Abort"):
            await self._stub.Abort(transfer_pb2.AbortRequest(ticket=ticket), timeout=ABORT_S)


@contextmanager
def in_time(call: str) -> Iterator[None]:
    """Calls inside raise ServingErrors. One without an answer in time is Unreachable, as one whose peer is gone."""
    try:
        with statuses.serving_errors():
            yield
    except DeadlineExceeded as error:
        raise Unreachable(f"{call}: the target did not answer in time") from error


async def asked_twice(call: str, ask: Callable[[], Awaitable[T]]) -> T:
    """What the target answers to a call that it may be asked twice, if the first answer is lost."""
    try:
        with in_time(call):
            return await ask()
    except Unreachable:
        with in_time(call):
            return await ask()


def require_same_model(info: RunnerInfo, fingerprint: str, layout: str, numerics: str) -> None:
    """Raises Mismatch unless the other worker has the same model, layout of blocks and class of numerics."""
    if info.fingerprint != fingerprint:
        raise Mismatch(f"this worker serves {info.fingerprint}, the other one {fingerprint}")
    if info.layout != layout:
        raise Mismatch(f"blocks here are laid out as {info.layout}, those of the other worker as {layout}")
    if info.numerics != numerics:
        raise Mismatch(f"tokens here are computed as {info.numerics!r}, those of the other worker as {numerics!r}")


def wanted_to_wire(wanted: WantedBlock) -> transfer_pb2.WantedBlock:
    return transfer_pb2.WantedBlock(index=wanted.index, hash=wanted.block_hash)


def wanted_from_wire(messages: Iterable[transfer_pb2.WantedBlock]) -> list[WantedBlock]:
    """The blocks that a target wants. Raises Mismatch if one of them has no hash, or two have one index."""
    wanted = [WantedBlock(message.index, BlockHash(message.hash)) for message in messages]
    if any(len(each.block_hash) != HASH_BYTES for each in wanted) or len({w.index for w in wanted}) != len(wanted):
        raise Mismatch("the target wants blocks by hashes that are none: it runs another version")
    return wanted


def standby_to_wire(request: StandbyRequest) -> transfer_pb2.StandbyRequest:
    return transfer_pb2.StandbyRequest(
        owner=request.owner,
        model_fingerprint=request.fingerprint,
        kv_layout=request.layout,
        numerics=request.numerics,
        histories=[
            transfer_pb2.NamedHistory(
                seq_id=each.seq_id,
                branch=each.branch,
                first=each.first,
                hashes=b"".join(each.hashes),
                blocks=map(_sent_to_wire, each.blocks),
                tail=_sent_to_wire(each.tail) if each.tail is not None else None,
            )
            for each in request.histories
        ],
        number=request.number,
    )


def _sent_to_wire(block: SentBlock) -> transfer_pb2.SentBlock:
    return transfer_pb2.SentBlock(hash=block.name, content=block.content, checksum=block_checksum(block))
