"""Which sequences begin here. What the engine has decided reaches the event loop in the order in which it decided it,
so the log of a sequence is opened before the first tokens for it arrive.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from gpu_worker.constraints.grammars import Grammars
from gpu_worker.engine.adapter_loader import AdapterLoader
from gpu_worker.engine.adapter_shelf import AdapterShelf
from gpu_worker.engine.block_port import checked_sequence
from gpu_worker.engine.command_port import CommandPort
from gpu_worker.engine.picture_loader import PictureLoader
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.sequence import CarriedScores, Hold, Sequence
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.serving.admission.beam_texts import BeamTexts
from gpu_worker.serving.admission.prefix_offers import OfferedPrefix, PrefixOffers
from gpu_worker.serving.admission.trial_queue import OwnershipAnnouncer, TrialQueue
from octavo.process.loop import shared
from octavo.request import hashing
from octavo.request.errors import (
    Draining,
    InvalidArgument,
    Loading,
    NoAdapterRoom,
    OutOfBlocks,
    ServingError,
    StaleEpoch,
    Unimplemented,
)
from octavo.request.ids import SequenceId
from octavo.request.record import Admission, AdmissionAnswer, AdmissionOutcome

log = logging.getLogger(__name__)

WARM_UP_AFTER_S = 5.0  # the first requests of a worker that has just started come before grammars


class Admissions:
    """Admits sequences and cancels them. Lives on the event loop."""

    def __init__(
        self,
        port: CommandPort,
        workload: Workload,
        publisher: StepPublisher,
        trials: TrialQueue,
        offers: PrefixOffers,
        announcer: OwnershipAnnouncer | None = None,
        adapters: AdapterLoader | None = None,
        pictures: PictureLoader | None = None,
    ) -> None:
        """Without an `announcer` no store knows of this worker. Without `adapters` or `pictures` none runs here."""
        self._port = port
        self._workload = workload
        self._publisher = publisher
        self._trials = trials
        self._offers = offers
        self._announcer = announcer
        self._adapters = adapters or AdapterLoader(AdapterShelf(None, 0, set), port)
        self._pictures = pictures
        self._beam_texts = BeamTexts(workload.info)
        self._grammars = Grammars(workload.info)
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(WARM_UP_AFTER_S, self._warm_up)
        self._deciding: dict[tuple[SequenceId, int], asyncio.Task[AdmissionAnswer]] = {}

    def _warm_up(self) -> None:
        with suppress(RuntimeError):  # the worker ends
            self._loop.run_in_executor(None, self._grammars.warm_up)

    async def admit(
        self, admission: Admission, router_id: str, carried: CarriedScores | None = None
    ) -> AdmissionAnswer:
        """The worker's answer.

        `carried` says that the sequence has moved here with its blocks, which an import holds until this returns: it
        runs in the next step. If its blocks, its scores or the room for it are missing, it is computed again.

        An admission that is being decided, or was admitted, is not decided again: a repetition gets the same answer.
        After a refusal it is decided anew. Raises Draining if the engine has ended.
        """
        key = (admission.seq_id, admission.epoch)
        deciding = self._deciding.get(key)
        if deciding is None:
            deciding = asyncio.create_task(self._decide(admission, router_id, carried))
            self._deciding[key] = deciding
            deciding.add_done_callback(lambda _: self._deciding.pop(key))
        answer = await shared(deciding)
        sequence_log = self._publisher.logs.get(admission.seq_id)
        if sequence_log is not None and sequence_log.epoch == admission.epoch:
            self._publisher.add_follower(sequence_log, router_id)
        return answer

    def runs(self, seq_id: SequenceId, epoch: int) -> bool:
        """Whether the sequence runs here at that epoch, or its admission is being decided."""
        sequence_log = self._publisher.logs.get(seq_id)
        return (seq_id, epoch) in self._deciding or (sequence_log is not None and sequence_log.epoch == epoch)

    def cancel(self, sequences: Iterable[tuple[SequenceId, int]]) -> None:
        """Ends each sequence with CANCELLED, unless it is here at a newer epoch than the one given."""
        cancelled = list(sequences)

        def command(scheduler: Scheduler) -> None:
            for seq_id, epoch in cancelled:
                sequence = self._workload.sequences.get(seq_id)
                if sequence is not None and sequence.epoch <= epoch:
                    scheduler.cancel(sequence)

        self._port.tell(command)

    async def _decide(self, admission: Admission, router_id: str, carried: CarriedScores | None) -> AdmissionAnswer:
        known_epoch = self._publisher.known_epoch(admission.seq_id)
        if known_epoch == admission.epoch:  # also when it has ended since
            return AdmissionAnswer(AdmissionOutcome.ADMITTED)
        if known_epoch is not None and known_epoch > admission.epoch:
            stale = StaleEpoch(f"sequence {admission.seq_id} was here at epoch {known_epoch}, not {admission.epoch}")
            return AdmissionAnswer(AdmissionOutcome.STALE_EPOCH, stale.failure())
        try:
            sequence = checked_sequence(admission, self._workload.info)
            sequence.grammar = await self._grammars.compiled(sequence.params.constraint)
            await self._adapters.bring(admission.lora, admission.lora_source)
            if self._pictures is not None:
                await self._pictures.bring(admission.seq_id, sequence.pictures, admission.salt)
            elif sequence.pictures:
                raise Unimplemented("no picture is encoded on this worker")
        except InvalidArgument as error:
            return AdmissionAnswer(AdmissionOutcome.REJECTED, error.failure())
        except Draining:
            raise
        except (Loading, OutOfBlocks) as error:
            return AdmissionAnswer(AdmissionOutcome.LATER, error.failure())
        except ServingError as error:
            return AdmissionAnswer(AdmissionOutcome.NEVER, error.failure())
        except Exception as error:  # a defect: without this answer routers would ask again for ever
            log.exception("sequence %s cannot begin here", admission.seq_id)
            broken = ServingError(f"a worker could not begin it: {type(error).__name__}; its log says where")
            return AdmissionAnswer(AdmissionOutcome.NEVER, broken.failure())
        if carried is not None and carried.fit(admission):
            sequence.carried = carried
            for branch in sequence.branches:
                branch.hashes = list(carried.hashes.get(branch.index, ()))
        try:
            sequence.beam_text = await self._beam_texts.new_text(sequence.params)
        except ServingError as error:
            return AdmissionAnswer(AdmissionOutcome.NEVER, error.failure())
        if self._announcer is not None and (refused := await self._announcer.refuse_admission(admission)):
            return refused
        offer = await self._offers.find(sequence, admission)
        return await self._port.ask(self._admission_command(sequence, admission, router_id, offer))

    def _give_adapter(self, sequence: Sequence, digest: str) -> AdmissionAnswer | None:
        """Within the command that admits: from here on the adapter stays. An answer: it has left for others."""
        try:
            if sequence.carried is None:  # what moves here with its blocks has begun
                self._adapters.shelf.require_turn(digest)
        except NoAdapterRoom as error:
            return AdmissionAnswer(AdmissionOutcome.LATER, error.failure())
        sequence.adapter = self._adapters.shelf.find(digest)
        if sequence.adapter or not digest:
            return None
        left = NoAdapterRoom(f"adapter {digest} has left for others: place elsewhere")
        return AdmissionAnswer(AdmissionOutcome.LATER, left.failure())

    def _expect_pictures(self, sequence: Sequence) -> AdmissionAnswer | None:
        """Within the command that admits: from here on its pictures stay. An answer: some have left for others."""
        if not sequence.pictures or (self._pictures is not None and self._pictures.shelf.has_all(sequence.pictures)):
            return None
        left = Loading("pictures of it have left for those of others: place elsewhere, or retry")
        return AdmissionAnswer(AdmissionOutcome.LATER, left.failure())

    def _admission_command(
        self, sequence: Sequence, admission: Admission, router_id: str, offer: OfferedPrefix | None
    ) -> Callable[[Scheduler], AdmissionAnswer]:
        """The command that admits the sequence and opens its log.

        A log of an older epoch is forgotten even if the sequence is refused: the newer epoch fences the older owner.
        """
        outputs = admission.outputs or [[] for _ in range(sequence.params.num_branches)]
        chain = hashing.prompt_chain(sequence.prompt)
        publisher, offers, soon = self._publisher, self._offers, self._loop.call_soon_threadsafe

        def open_log() -> None:
            sequence_log = publisher.open_log(sequence, chain, outputs, admission.finished_branches, router_id)
            if Hold.CRASHED in sequence.holds:
                self._trials.add(sequence_log)

        def command(scheduler: Scheduler) -> AdmissionAnswer:
            allowed_s = offers.worth_waiting(offer) if offer else 0.0
            if allowed_s:
                sequence.holds.add(Hold.AWAITS_PREFIX)
            answer = (
                self._give_adapter(sequence, admission.lora)
                or self._expect_pictures(sequence)
                or scheduler.admit(sequence)
            )
            if answer.admitted:
                soon(open_log)
                if offer and allowed_s:
                    soon(offers.begin_fetch, sequence, offer, allowed_s)
            else:
                soon(publisher.forget_before, sequence.seq_id, sequence.epoch)
            return answer

        return command
