"""Writes into the store that a suspect begins to run on this worker, before it does.

The death of a worker counts against a suspect only after that: a worker that was dead when it was given the sequence
proves nothing.
"""

from octavo.errors import StaleEpoch, StoreUnavailable
from octavo.ids import Incarnation
from octavo.record import Admission, AdmissionAnswer, AdmissionOutcome
from octavo.store.base import Store

FIRST_EPOCH = 1  # of a sequence that had no owner before: it is no suspect


class SuspectAnnouncer:
    """Asks the store before a sequence that had another owner is admitted here."""

    def __init__(self, store: Store, owner: Incarnation) -> None:
        self._store = store
        self._owner = owner

    async def refuse_admission(self, admission: Admission) -> AdmissionAnswer | None:
        """The answer that refuses the sequence, or None: it may run, and is announced if it is a suspect.

        Without an answer of the store the sequence does not run here.
        """
        if admission.epoch <= FIRST_EPOCH:
            return None
        try:
            owns = await self._store.announce(admission.seq_id, admission.epoch, self._owner)
        except StoreUnavailable as error:
            return AdmissionAnswer(AdmissionOutcome.LATER, error.failure())
        if owns:
            return None
        stale = StaleEpoch(f"sequence {admission.seq_id}: this worker does not own it at epoch {admission.epoch}")
        return AdmissionAnswer(AdmissionOutcome.STALE_EPOCH, stale.failure())
