"""Which suspect has the engine to itself now, and from when to when.

The store blames a suspect on trial for the death of its worker. So nothing else may run on the worker while the
store would do so: from before the suspect is announced, until the store knows that the suspect has proved itself or is
not here any more. Other sequences pause meanwhile, and further suspects wait for their turn, unannounced.
"""

import asyncio
import logging

from gpu_worker.engine.command_port import CommandPort
from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.scheduling.state.sequence import Sequence
from octavo.process.retry import until_answered
from octavo.request.errors import Draining, StaleEpoch, StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Admission, AdmissionAnswer, AdmissionOutcome
from octavo.store.base import Store

log = logging.getLogger(__name__)

FIRST_EPOCH = 1  # of a sequence that had no owner before: it is no suspect
ABSENT_ROUND_S = 10.0  # a suspect that the engine has lost, and the store did not hear of, is waited for two rounds


class OwnershipAnnouncer:
    """Announces every sequence that had another owner to the store, before it begins here.

    The store notes that a suspect begins. The death of a worker counts against a suspect only after that: a worker that
    was dead when it was given the sequence proves nothing.
    """

    def __init__(self, store: Store, owner: Incarnation) -> None:
        self._store = store
        self._owner = owner

    async def announce(self, seq_id: SequenceId, epoch: int) -> bool:
        """Whether this worker owns the sequence at that epoch, so that it may begin. Raises StoreUnavailable."""
        return await self._store.announce(seq_id, epoch, self._owner)

    async def refuse_admission(self, admission: Admission) -> AdmissionAnswer | None:
        """The answer that refuses the sequence, or None: it may begin at once.

        Without an answer of the store the sequence does not run here. A suspect is announced later, when it has the
        engine to itself (`TrialQueue`).
        """
        if admission.epoch <= FIRST_EPOCH or admission.suspect:
            return None
        try:
            owns = await self.announce(admission.seq_id, admission.epoch)
        except StoreUnavailable as error:
            return AdmissionAnswer(AdmissionOutcome.LATER, error.failure())
        if owns:
            return None
        stale = StaleEpoch(f"sequence {admission.seq_id}: this worker does not own it at epoch {admission.epoch}")
        return AdmissionAnswer(AdmissionOutcome.STALE_EPOCH, stale.failure())


class TrialQueue:
    """Gives the engine to one suspect after the other. Lives on the event loop."""

    def __init__(self, port: CommandPort, publisher: StepPublisher, announcer: OwnershipAnnouncer | None) -> None:
        """Without an `announcer` no store knows of this worker, and suspects are not announced."""
        self._port = port
        self._publisher = publisher
        self._announcer = announcer
        self._turn = asyncio.Lock()  # whoever has it has the engine
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, sequence_log: SequenceLog) -> None:
        """Puts a suspect at the end of the queue. It does not run before its turn."""
        task = asyncio.create_task(self._hold_trial(sequence_log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Ends all trials. The engine must have ended."""
        for task in self._tasks:
            task.cancel()

    async def _hold_trial(self, sequence_log: SequenceLog) -> None:
        async with self._turn:
            if sequence_log.settled.is_set():
                return
            try:
                await self._have_engine(sequence_log)
            except Draining:
                pass  # the engine has ended, and so has the trial
            except Exception:
                log.exception("sequence %s cannot have its trial: others may have it", sequence_log.seq_id)
                self._drop(sequence_log.sequence)
                self._publisher.release_log(sequence_log)
            finally:
                self._port.post(lambda scheduler: scheduler.end_trial(sequence_log.sequence))

    async def _have_engine(self, sequence_log: SequenceLog) -> None:
        """Returns when the suspect has proved itself, or is not here any more."""
        sequence = sequence_log.sequence
        if await self._port.ask(lambda scheduler: scheduler.reserve_steps(sequence)):
            if await self._announce(sequence):
                await self._port.ask(lambda scheduler: scheduler.begin_trial(sequence))
            else:
                log.warning("sequence %s: another worker owns it, or it has ended", sequence.seq_id)
                self._drop(sequence)
                self._publisher.forget_log(sequence_log)
        await self._wait_until_settled(sequence, sequence_log.settled)

    def _drop(self, sequence: Sequence) -> None:
        self._port.post(lambda scheduler: scheduler.drop(sequence))

    async def _announce(self, sequence: Sequence) -> bool:
        """Whether this worker owns the sequence, as the store says. While it is away, nothing could be journalled."""
        announcer = self._announcer
        if announcer is None:
            return True
        return await until_answered(lambda: announcer.announce(sequence.seq_id, sequence.epoch), what="a suspect")

    async def _wait_until_settled(self, sequence: Sequence, settled: asyncio.Event) -> None:
        was_here = True
        while not settled.is_set():
            try:
                async with asyncio.timeout(ABSENT_ROUND_S):
                    await settled.wait()
            except TimeoutError:
                is_here = await self._port.ask(lambda scheduler: scheduler.is_here(sequence))
                if not (is_here or was_here):
                    log.warning("sequence %s: gone, and the store has not answered: others go on", sequence.seq_id)
                    return
                was_here = is_here
