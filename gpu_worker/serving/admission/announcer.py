"""Asks the store whether this worker owns a sequence, before the sequence begins to run here.

The store notes that a suspect begins. The death of a worker counts against a suspect only after that: a worker that was
dead when it was given the sequence proves nothing.
"""

from octavo.request.errors import StaleEpoch, StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Admission, AdmissionAnswer, AdmissionOutcome
from octavo.store.base import Store

FIRST_EPOCH = 1  # of a sequence that had no owner before: it is no suspect


class OwnershipAnnouncer:
    """Announces every sequence that had another owner before it begins here."""

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
