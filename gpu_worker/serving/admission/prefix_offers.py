"""Blocks of a sequence that another worker is said to have, or the disk: which are worth a wait, and the wait."""

import asyncio
import logging
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from gpu_worker.engine.command_port import CommandPort
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.migration.disk.disk_reader import DiskReader
from gpu_worker.migration.prefix.prefix_fetcher import PrefixFetcher
from gpu_worker.scheduling.block_exchange import BlockExchange
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.workload import Workload
from octavo.process.loop import end_tasks
from octavo.request import hashing
from octavo.request.ids import BlockHash, Incarnation
from octavo.request.record import Admission

log = logging.getLogger(__name__)


class PrefixSource(Protocol):
    """Where blocks come from."""

    def allowed_s(self, num_blocks: int, tokens_per_s: float) -> float:
        """How long a sequence may wait for so many blocks; 0.0: not at all."""
        ...

    async def fetch(self, hashes: SequenceOf[BlockHash], allowed_s: float) -> int:
        """Gets the blocks that are lacking, as far as they come in time. Returns how many have come."""
        ...


class OtherWorker(NamedTuple):
    """A source."""

    fetcher: PrefixFetcher
    owner: Incarnation

    def allowed_s(self, num_blocks: int, tokens_per_s: float) -> float:
        return self.fetcher.allowed_s(self.owner, num_blocks, tokens_per_s)

    async def fetch(self, hashes: SequenceOf[BlockHash], allowed_s: float) -> int:
        return await self.fetcher.fetch(self.owner, hashes, allowed_s)


class OfferedPrefix(NamedTuple):
    """Leading blocks of a sequence that a source is said to have."""

    source: PrefixSource
    hashes: list[BlockHash]


class PrefixOffers:
    """Lets a sequence wait for blocks that need not be computed. Without `fetcher` and `disk` it computes them."""

    def __init__(
        self,
        port: CommandPort,
        workload: Workload,
        times: StepTimes,
        fetcher: PrefixFetcher | None = None,
        disk: DiskReader | None = None,
    ) -> None:
        self._port = port
        self._info = workload.info
        self._exchange = BlockExchange(workload)
        self._times = times
        self._fetcher = fetcher
        self._disk = disk
        self._closed = False
        self._fetching: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends the wait of all sequences for blocks: no source is asked for more."""
        self._closed = True
        await end_tasks(self._fetching)
        for source in (self._fetcher, self._disk):
            if source is not None:
                await source.close()

    async def find(self, sequence: Sequence, admission: Admission) -> OfferedPrefix | None:
        """The longest part of the sequence that a source has, if the sequence can use it.

        Of the output it can, if it has one branch, and if no token of it is to be scored again.
        """
        owner, params = admission.prefix_owner, admission.sampling
        if admission.suspect or sequence.carried or params.prompt_logprobs is not None:
            return None
        scored = params.logprobs is not None or params.ranked
        tokens = sequence.prompt if scored or len(sequence.branches) > 1 else sequence.branches[0].tokens
        offered = min(admission.prefix_owner_tokens, len(tokens) - 1) if self._fetcher is not None and owner else 0
        num_tokens = len(tokens) - 1 if self._disk is not None else offered
        size = self._info.block_size
        hashes = hashing.block_hashes(sequence.root, tokens[:num_tokens], size, shown=sequence.shown)
        num_offered = offered // size
        num_on_disk = await self._disk.num_leading(hashes) if self._disk is not None and hashes else 0
        if self._disk is not None and num_on_disk and num_on_disk >= num_offered:
            return OfferedPrefix(self._disk, hashes[:num_on_disk])
        if self._fetcher is not None and owner and num_offered:
            return OfferedPrefix(OtherWorker(self._fetcher, owner), hashes[:num_offered])
        return None

    def worth_waiting(self, offer: OfferedPrefix) -> float:
        """How long to wait for an offer; 0.0: not at all. Only the engine's thread may call this."""
        num_blocks = self._exchange.num_lacking(offer.hashes)
        return 0.0 if self._closed else offer.source.allowed_s(num_blocks, self._times.prefill_tokens_per_s)

    def begin_fetch(self, sequence: Sequence, offer: OfferedPrefix, allowed_s: float) -> None:
        """Fetches the blocks, and then lets the sequence start in its turn, with or without them."""
        fetching = asyncio.create_task(self._fetch(sequence, offer, allowed_s))
        self._fetching.add(fetching)
        fetching.add_done_callback(self._fetching.discard)

    async def _fetch(self, sequence: Sequence, offer: OfferedPrefix, allowed_s: float) -> None:
        try:
            if not self._closed:
                await offer.source.fetch(offer.hashes, allowed_s)
        except Exception:
            log.exception("the prefix of sequence %s is computed", sequence.seq_id)
        finally:
            self._port.tell(lambda scheduler: scheduler.end_wait(sequence))
