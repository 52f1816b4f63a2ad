"""The wire events of one stream: each piece of a delivery, with a token to resume from the place after it."""

from collections.abc import Sequence

from octavo import wire
from octavo.record import Record
from octavo.sampling import TokenScore
from octavo.step_item import StepItem
from octavo.v1 import inference_pb2
from router.streaming.branch_reader import BranchPiece
from router.streaming.delivery import Delivery
from router.streaming.resume_tokens import ResumeTokens

Event = inference_pb2.GenerateEvent


class EventEncoder:
    """Encodes what one delivery gives out."""

    def __init__(self, record: Record, delivery: Delivery, resume_tokens: ResumeTokens) -> None:
        self._request_id = record.request_id
        self._id_bytes = record.request_id.encode()
        self._prompt_len = record.prompt_len
        self._delivery = delivery
        self._resume_tokens = resume_tokens
        self._prompt_scores: Sequence[TokenScore] = ()
        self._cached_tokens = 0

    def note_item(self, item: StepItem) -> None:
        """Remembers what the first item of a sequence says of the prompt."""
        if item.cached_tokens is not None:
            self._cached_tokens = item.cached_tokens
        if item.prompt_scores:
            self._prompt_scores = item.prompt_scores

    def next_events(self) -> list[Event]:
        """The events since the last call. The last one of all carries the usage, and the failure if there is one."""
        events = []
        while (piece := self._delivery.next_piece()) is not None:
            events.append(self._event(piece))
        if self._delivery.ended:
            events[-1].finished.CopyFrom(self._finished())
        return events

    def _event(self, piece: BranchPiece) -> Event:
        event = Event(
            request_id=self._request_id,
            branch=piece.branch,
            first_index=piece.first_index,
            token_ids=piece.token_ids,
            text=piece.text,
            resume_token=self._resume_tokens.make_token(self._id_bytes, self._delivery.places),
        )
        if piece.token_scores:
            event.logprobs.extend(wire.score_to_wire(score) for score in piece.token_scores)
        if self._prompt_scores and piece.branch == 0:
            event.prompt_logprobs.extend(wire.score_to_wire(score) for score in self._prompt_scores)
            self._prompt_scores = ()
        if piece.finish:
            event.finish_reason = wire.finish_to_wire(piece.finish)
        return event

    def _finished(self) -> inference_pb2.Finished:
        failure, num_output = self._delivery.failure, self._delivery.num_output_tokens()
        return inference_pb2.Finished(
            usage=wire.usage_to_wire(self._prompt_len, num_output, self._cached_tokens),
            failure=wire.failure_to_wire(failure) if failure else None,
        )
