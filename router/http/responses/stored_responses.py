"""Finds responses again by their records, and shows them."""

from dataclasses import dataclass
from typing import Any

from octavo.request import validation
from octavo.request.errors import Failure, InvalidArgument, NotFound, NoWorkers
from octavo.request.ids import SequenceId
from octavo.request.record import Snapshot
from octavo.request.sampling import FinishReason
from octavo.wire.public import sampling_from_bytes
from router.http.answers import AnswerService
from router.http.responses.input_items import Item
from router.http.responses.response_body import ID_PREFIX
from router.http.responses.response_events import NO_EVENTS, ResponseEvents
from router.http.responses.response_notes import ResponseNotes
from router.streaming.prompts.chat_threads import run_aside

BYTES_EACH = 8  # what a token, or a compressed byte, counts when it is decided what is done aside


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response at one moment, by its record and its journal."""

    notes: ResponseNotes
    snapshot: Snapshot
    shown: dict[str, Any]
    output: list[Item]

    @property
    def ended(self) -> bool:
        return bool(self.shown["status"] not in ("queued", "in_progress"))


@dataclass(eq=False)
class StoredResponses:
    """The responses of the caller's tenant, whichever router took them."""

    service: AnswerService

    def sequence_of(self, response_id: str) -> SequenceId:
        """Raises NotFound for what is no id of a response."""
        if not response_id.startswith(ID_PREFIX):
            raise unknown_response(response_id)
        try:
            return self.service.opener.sequence_of(validation.validate_request_id(response_id))
        except InvalidArgument:
            raise unknown_response(response_id) from None

    async def notes(self, response_id: str) -> ResponseNotes:
        """Raises NotFound for a response that is not there any more, or was never there."""
        store = self.service.inference.store
        data = await store.read_notes(self.sequence_of(response_id))
        found = await run_aside(len(data) * BYTES_EACH, lambda: ResponseNotes.from_bytes(data))
        if found is None:
            raise unknown_response(response_id)
        return found

    async def stored_notes(self, response_id: str) -> ResponseNotes:
        """Raises NotFound also for a response that was not to be stored."""
        notes = await self.notes(response_id)
        if not notes.stored:
            raise unknown_response(response_id)
        return notes

    async def has_ended(self, response_id: str) -> bool:
        """Raises NotFound for a response that is not there any more."""
        snapshot = await self.service.inference.store.read(self.sequence_of(response_id))
        if snapshot is None:
            raise unknown_response(response_id)
        return snapshot.record.state.ended

    async def find(self, response_id: str) -> StoredResponse:
        """Raises NotFound also for a response that was not to be stored."""
        notes = await self.stored_notes(response_id)
        store = self.service.inference.store
        snapshot = await store.read(self.sequence_of(response_id), from_indexes=[0])
        if snapshot is None:
            raise unknown_response(response_id)
        return await self._shown(response_id, notes, snapshot)

    async def _shown(self, response_id: str, notes: ResponseNotes, snapshot: Snapshot) -> StoredResponse:
        record = snapshot.record
        model = self.service.inference.models.find_for_record(record)
        if model is None:
            raise NoWorkers("no worker has been met that serves this response's model: retry", retry_after_ms=500)
        params, num_given = sampling_from_bytes(record.sampling), model.encoder.num_given(record.prompt_len)
        events = ResponseEvents(response_id, notes, model, params, num_given, NO_EVENTS)
        return await run_aside(len(snapshot.outputs[0]) * BYTES_EACH, lambda: show(events, notes, snapshot))


def show(events: ResponseEvents, notes: ResponseNotes, snapshot: Snapshot) -> StoredResponse:
    """The response that new events make of the whole journal."""
    record, tokens = snapshot.record, snapshot.outputs[0]
    finish = record.finishes[0]
    if tokens or record.state.ended or not notes.background:
        events.begin()
    events.cached_tokens = record.cached_tokens
    failure = Failure.from_json(record.failure) if record.failure else None
    events.add(tokens[: record.final_lengths[0]] if finish else tokens, finish or FinishReason.NONE, failure)
    return StoredResponse(notes, snapshot, events.response(), events.output)


def unknown_response(response_id: str) -> NotFound:
    return NotFound(
        f"no response {response_id[:128]!r}: never accepted, not stored, or ended longer ago than records are kept",
        resource="response",
        name=response_id[:128],
    )
