"""The buddy of other workers' sequences: gets the blocks of their histories into the prefix cache here, by and by."""

import asyncio
import logging
import time

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.migration.calls.standby_calls import HistoryState, NamedHistory, StandbyRequest
from gpu_worker.migration.calls.transfer_calls import require_same_model
from gpu_worker.migration.prefix.prefix_fetcher import PrefixFetcher
from gpu_worker.migration.standby.kept_histories import KeepChange, KeptHistories, KeptHistory
from gpu_worker.scheduling.standby_blocks import SentBlock
from gpu_worker.steps.runner import BlockMemory, BlocksInPlace
from octavo.request.errors import Draining, InvalidArgument, OutOfBlocks, ServingError
from octavo.request.ids import BlockHash, BlockId, Incarnation

log = logging.getLogger(__name__)

KEPT_SHARE = 0.5  # of all blocks may be kept for standbys: what runs here needs the others
FETCH_BYTES = 4 << 20  # of one fetch, or one block: `LinkShare` holds more back, and the pause is enough
FETCH_S = 2.0
PAUSE_FACTOR = 1.0  # a pause after each fetch, in times of that fetch: both workers are left to others meanwhile
LONGEST_PAUSE_S = 1.0
RETRY_S = 1.0  # how long an owner is left alone that did not send
STALLED_S = 2.0  # how long a history is left alone whose next blocks its owner did not have
IDLE_S = 1.0  # how often the table is looked at without a call


class StandbyBuddy:
    """Never runs, owns or promises a sequence. Lives on the event loop."""

    def __init__(self, blocks: BlockPort, watch: WorkerWatch, fetcher: PrefixFetcher, memory: BlockMemory) -> None:
        self.histories = KeptHistories(int(KEPT_SHARE * blocks.info.num_blocks))
        self.num_refused = 0  # histories for which there was no room
        self._blocks = blocks
        self._watch = watch
        self._fetcher = fetcher
        self._memory = memory
        self._most_fetched = max(1, FETCH_BYTES // max(1, memory.bytes_per_block))
        self._wake = asyncio.Event()
        self._retry_at: dict[Incarnation, float] = {}
        self._num_lost = 0  # by the last count of what was held

    async def note_histories(self, request: StandbyRequest) -> list[HistoryState]:
        """Takes in all that an owner wants kept. Raises Mismatch, Draining, or InvalidArgument for a block."""
        if self._watch.draining:
            raise Draining("this worker drains: choose another one")
        require_same_model(self._blocks.info, request.fingerprint, request.layout, request.numerics)
        self._check_sizes(request)
        change, states = self.histories.update(request.owner, request.number, request.histories, time.monotonic())
        self.num_refused += sum(each.refused for each in states)
        await self._apply(change)
        if isinstance(self._memory, BlocksInPlace):  # else what comes with a call is of no use
            for index, each in enumerate(request.histories):
                kept = self.histories.find(request.owner, request.number, (each.seq_id, each.branch))
                if kept is not None and not kept.refused:
                    await self._keep_sent(kept, each)
                    states[index] = kept.state
        self._wake.set()  # for what has not come with the call
        return states

    def _check_sizes(self, request: StandbyRequest) -> None:
        size = self._memory.bytes_per_block
        for index, each in enumerate(request.histories):
            sent = {f"blocks[{number}]": block for number, block in enumerate(each.blocks)}
            for field, block in (sent | ({"tail": each.tail} if each.tail is not None else {})).items():
                if len(block.content) != size:
                    told = f"{len(block.content)} bytes, and a block of this layout has {size}: send the whole block"
                    raise InvalidArgument(f"histories[{index}].{field}.content", told)

    async def _keep_sent(self, kept: KeptHistory, named: NamedHistory) -> None:
        """Keeps the blocks of a history that have come with a call."""
        first = named.first + len(named.hashes) - len(named.blocks)
        are_last = bool(named.blocks) and kept.hashes[first:] == [each.name for each in named.blocks]
        if are_last and await self._blocks.put_blocks(named.blocks, self._write) and kept.num_held == first:
            kept.num_held = min(first + len(named.blocks), len(kept.hashes))  # it may have been refused meanwhile
        if named.tail is not None and not kept.refused:
            await self._keep_tail(kept, named.tail)

    async def _keep_tail(self, kept: KeptHistory, tail: SentBlock) -> None:
        """Keeps a tail instead of the one that this history had."""
        change = KeepChange([], self.histories.set_tail(kept, tail.name))
        if kept.tail is None:
            await self._apply(change)
        elif not await self._blocks.put_tail(tail, change.ended, self._write) and kept.tail == tail.name:
            self.histories.end_tail(kept, change)

    def _write(self, block: BlockId, content: bytes) -> None:
        left = memoryview(content)
        for run in self._memory.open_block(block):
            run[:], left = left[: len(run)], left[len(run) :]
        self._memory.keep_block(block)
        self._memory.close_block(block)

    async def run(self) -> None:
        """Fetches what is lacking, for as long as the worker lives."""
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self.go_round()
            except ServingError as error:
                log.info("no standbys are fetched in this round: %s", error.message)
            except Exception:  # a standby is worth no sequence of this worker
                log.exception("no standbys are fetched in this round")

    async def go_round(self) -> None:
        """Gives up what nobody names any more, and makes one fetch from each owner."""
        await self._apply(self.histories.expire(time.monotonic()))
        await self._recount_lost()
        self._retry_at = {owner: at for owner, at in self._retry_at.items() if owner in self.histories.owners}
        for owner in self.histories.owners:
            await self._fetch_round(owner)

    async def _fetch_round(self, owner: Incarnation) -> None:
        """One fetch from an owner, and the pause after it if more is lacking. That is for the next round."""
        now = time.monotonic()
        if self._retry_at.get(owner, 0.0) > now or self._watch.draining:
            return
        histories, hashes = self.histories.lacking(owner, self._most_fetched, now)
        if not hashes:
            return
        try:
            await self._fetcher.fetch_from(owner, hashes, FETCH_S, standby=True)
        except OutOfBlocks as error:
            log.info("histories of worker %s are not kept here: %s", owner, error.message)
            self.num_refused += len(histories)
            await self._apply(self.histories.refuse(histories))
            return
        except (ServingError, TimeoutError, OSError) as error:
            log.info("blocks of histories of worker %s have not come: %s", owner, str(error) or "not in time")
            self._retry_at[owner] = time.monotonic() + RETRY_S
        num_held = sum(each.num_held for each in histories)
        await self._count(histories)
        num_come = sum(each.num_held for each in histories) - num_held
        num_named = sum(len(each.hashes) for each in histories)
        text = "%d of %d blocks asked of worker %s came in %.0f ms; its histories have %d here, of %d named"
        log.debug(text, num_come, len(hashes), owner, 1000 * (time.monotonic() - now), num_held + num_come, num_named)
        if len(hashes) == self._most_fetched:  # there is more to fetch; else the owner's rounds are the pause
            self._wake.set()
            await asyncio.sleep(min(LONGEST_PAUSE_S, PAUSE_FACTOR * (time.monotonic() - now)))

    async def _count(self, histories: list[KeptHistory]) -> None:
        """Counts what has come of these. A history without progress is left alone for a while."""
        rest: list[list[BlockHash]] = [each.hashes[each.num_held :] for each in histories]
        stalled_until = time.monotonic() + STALLED_S
        for kept, num_come in zip(histories, await self._blocks.num_known(rest), strict=True):
            kept.num_held = min(kept.num_held + num_come, len(kept.hashes))  # it may have been refused meanwhile
            if not num_come:
                kept.stalled_until = stalled_until

    async def _recount_lost(self) -> None:
        """Counts all histories anew if blocks of some have been evicted since the last time."""
        num_lost = self._blocks.num_standby_lost
        if num_lost == self._num_lost:
            return
        self._num_lost = num_lost
        histories = list(self.histories.all())
        counts = await self._blocks.num_known([each.hashes for each in histories])
        for kept, num_held in zip(histories, counts, strict=True):
            kept.num_held = min(num_held, len(kept.hashes))

    async def _apply(self, change: KeepChange) -> None:
        if change.begun or change.ended:
            await self._blocks.stand_by(change.begun, change.ended)
