"""Sends the blocks of a prompt to the worker that will have its output, while the prompt is computed.

    the sequence waits ─▶ its first blocks ─▶ a ticket ─▶ parts, as they are computed ─▶ first tokens ─▶ the last part

While the sequence waits, no other worker is asked for anything. The ticket is kept alive however long the prompt takes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.migration.source.migration_progress import SequenceGone, gone_without_engine
from gpu_worker.migration.source.ticket_sender import TicketSender
from gpu_worker.scheduling.block_exchange import WantedBlock
from gpu_worker.scheduling.freezer import PromptProgress
from octavo.request.errors import CannotMove, Code, ServingError

POLL_S = 0.01  # how often a prompt is looked at
REFRESH_S = 1.0  # how long a ticket is left unused
STALLED_S = 10.0  # without one more token computed, it is given up
MOST_PARTS = 16  # a part has at least this share of the blocks that were wanted at first


class PromptSender:
    """One prompt at the worker that computes it."""

    def __init__(self, blocks: BlockPort, sequence_log: SequenceLog) -> None:
        self._blocks = blocks
        self._log = sequence_log
        self._hurried = asyncio.Event()
        self._started = False

    @property
    def started(self) -> bool:
        """Whether the sequence has had blocks."""
        return self._started

    def hurry(self) -> None:
        """Waits no longer for a start: a sequence that has not started stays."""
        self._hurried.set()

    async def wait_for_start(self, num_waiting: Callable[[], int]) -> None:
        """Returns when some of the prompt is computed. The more sequences wait as this one does, the later it looks.

        Raises SequenceGone, or CannotMove with the reason why the sequence cannot move after its prompt either.
        """
        while not (await self._look()).started:
            if self._hurried.is_set():
                raise self._cannot("it waits to be started")
            try:
                async with asyncio.timeout(POLL_S * max(1, num_waiting())):
                    await self._hurried.wait()
            except TimeoutError:
                pass
        self._started = True

    async def send_computed(
        self, wanted: list[WantedBlock], sender: TicketSender, refresh: Callable[[], Awaitable[list[WantedBlock]]]
    ) -> list[WantedBlock]:
        """Sends the wanted blocks as they are computed. Returns those that are left when every branch has a token.

        `refresh` keeps the ticket alive, and says what the target lacks. Raises what sending raises, and what
        `wait_for_start` raises, also where the sequence has lost its blocks.
        """
        at_least = max(1, len(wanted) // MOST_PARTS)
        refreshed_at = moved_at = time.monotonic()
        num_computed = -1
        while not (progress := await self._look()).complete:
            now = time.monotonic()
            if progress.num_computed != num_computed:
                num_computed, moved_at = progress.num_computed, now
                if wanted:
                    num_before = len(wanted)
                    wanted = await sender.send_found(wanted, at_least)
                    refreshed_at = time.monotonic() if len(wanted) < num_before else refreshed_at
            if not progress.started or now - moved_at > STALLED_S:
                raise self._cannot("it waits for room")
            if time.monotonic() - refreshed_at > REFRESH_S:
                more = await self._refresh(refresh)
                wanted = list({each.index: each for each in [*wanted, *more]}.values())  # it names those again
                refreshed_at = time.monotonic()
            await asyncio.sleep(POLL_S)
        return wanted

    async def _refresh(self, refresh: Callable[[], Awaitable[list[WantedBlock]]]) -> list[WantedBlock]:
        try:
            return await refresh()
        except ServingError as error:
            if error.code is not Code.RESOURCE_EXHAUSTED:
                raise
            return []  # no room for more than it holds; the ticket lives on

    async def _look(self) -> PromptProgress:
        if self._log.gone:
            raise SequenceGone
        with gone_without_engine():
            return await self._blocks.prompt_progress(self._log.sequence.seq_id, self._log.epoch)

    def _cannot(self, why: str) -> CannotMove:
        return CannotMove(
            f"sequence {self._log.sequence.seq_id} does not move after its prompt: {why}", cause="waiting"
        )
