"""Has sequences move on to a worker for outputs, once a worker for prompts has admitted them."""

import logging
from dataclasses import dataclass

from octavo.request.errors import ServingError
from octavo.request.ids import SequenceId
from octavo.request.record import WorkerRole
from router.background_tasks import BackgroundTasks
from router.fleet.worker_link import WorkerLink
from router.placing.migrator import Migrator

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptHandover:
    """One attempt per admission, and one per stream that comes here from another router, which may have died before its
    attempt. A sequence that stays runs on where it is, and nobody but the log is told."""

    migrator: Migrator
    background: BackgroundTasks

    def note_owner(self, seq_id: SequenceId, link: WorkerLink) -> None:
        """A worker has admitted a sequence, or runs one whose stream has come to this router."""
        if link.role is WorkerRole.PREFILL:
            self.background.spawn(self._move(seq_id, link))

    async def _move(self, seq_id: SequenceId, link: WorkerLink) -> None:
        try:
            report = await self.migrator.move_after_prompt(seq_id, link.incarnation)
        except ServingError as error:
            log.debug("sequence %s stays at %s, which is for prompts: %s", seq_id, link.worker_id, error.message)
            return
        if report is None or not report.moved:
            why = "few tokens are to come, it has another owner, or no worker is for outputs"
            if report and report.failure:
                why = report.failure.message
            log.debug("sequence %s stays at %s, which is for prompts: %s", seq_id, link.worker_id, why)
