"""Blocks of a sequence that another worker is said to have: which of them are worth a wait, and the wait."""

import asyncio
import logging
from typing import NamedTuple

from gpu_worker.engine.command_port import CommandPort
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.migration.prefix.prefix_fetcher import PrefixFetcher
from gpu_worker.scheduling.block_exchange import BlockExchange
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.workload import Workload
from octavo.process.loop import end_tasks
from octavo.request import hashing
from octavo.request.ids import BlockHash, Incarnation
from octavo.request.record import Admission

log = logging.getLogger(__name__)


class OfferedPrefix(NamedTuple):
    """Leading blocks of a sequence that another worker is said to have."""

    owner: Incarnation
    hashes: list[BlockHash]


class PrefixOffers:
    """Lets a sequence wait for blocks of another worker. Without a `fetcher` it computes them, whoever has them."""

    def __init__(
        self, port: CommandPort, workload: Workload, times: StepTimes, fetcher: PrefixFetcher | None = None
    ) -> None:
        self._port = port
        self._info = workload.info
        self._exchange = BlockExchange(workload)
        self._times = times
        self._fetcher = fetcher
        self._fetching: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends the wait of all sequences for blocks of other workers, which are asked for nothing more."""
        fetcher, self._fetcher = self._fetcher, None
        await end_tasks(self._fetching)
        if fetcher is not None:
            await fetcher.close()

    def find(self, sequence: Sequence, admission: Admission) -> OfferedPrefix | None:
        """What another worker is said to have of prompt and output, if the sequence can use it.

        Of the output it can, if it has one branch, and if no token of it is to be scored again.
        """
        owner, params = admission.prefix_owner, admission.sampling
        if not (self._fetcher and owner) or admission.suspect or sequence.carried or params.prompt_logprobs is not None:
            return None
        scored = params.logprobs is not None or params.ranked
        tokens = sequence.prompt if scored or len(sequence.branches) > 1 else sequence.branches[0].tokens
        num_tokens = min(admission.prefix_owner_tokens, len(tokens) - 1)
        size = self._info.block_size
        hashes = hashing.block_hashes(sequence.root, tokens[:num_tokens], size, shown=sequence.shown)
        return OfferedPrefix(owner, hashes)

    def worth_waiting(self, offer: OfferedPrefix) -> float:
        """How long to wait for an offer; 0.0: not at all. Only the engine's thread may call this."""
        if self._fetcher is None:
            return 0.0
        num_blocks = self._exchange.num_lacking(offer.hashes)
        return self._fetcher.allowed_s(offer.owner, num_blocks, self._times.prefill_tokens_per_s)

    def begin_fetch(self, sequence: Sequence, offer: OfferedPrefix, allowed_s: float) -> None:
        """Fetches the blocks, and then lets the sequence start in its turn, with or without them."""
        fetching = asyncio.create_task(self._fetch(sequence, offer, allowed_s))
        self._fetching.add(fetching)
        fetching.add_done_callback(self._fetching.discard)

    async def _fetch(self, sequence: Sequence, offer: OfferedPrefix, allowed_s: float) -> None:
        try:
            if self._fetcher is not None:
                await self._fetcher.fetch(offer.owner, offer.hashes, allowed_s)
        except Exception:
            log.exception("the prefix of sequence %s is computed", sequence.seq_id)
        finally:
            self._port.tell(lambda scheduler: scheduler.end_wait(sequence))
