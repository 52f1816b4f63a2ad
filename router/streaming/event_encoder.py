"""The wire events of one stream: each piece of a delivery, with a token to resume from the place after it."""

from collections.abc import Sequence

from octavo.request.record import Record
from octavo.request.sampling import TokenScore
from octavo.request.step_item import StepItem
from octavo.v1 import inference_pb2
from octavo.wire.public import failure_to_wire, finish_to_wire, score_to_wire, usage_to_wire
from router.streaming.branch_reader import BranchPiece
from router.streaming.delivery import Delivery
from router.streaming.resume_tokens import ResumeTokens

Event = inference_pb2.GenerateEvent
MAX_PROMPT_SCORES = 4096  # in one event: with the most alternatives about 1 MiB


class EventEncoder:
    """Encodes what one delivery gives out."""

    def __init__(self, record: Record, num_given: int, delivery: Delivery, resume_tokens: ResumeTokens) -> None:
        """`num_given`: the tokens of the prompt that its client gave."""
        self._request_id = record.request_id
        self._id_bytes = record.request_id.encode()
        self._tenant = record.tenant
        self._prompt_len = num_given
        self._delivery = delivery
        self._resume_tokens = resume_tokens
        self._prompt_scores: Sequence[TokenScore] = ()
        self._prompt_scores_sent = False
        self.cached_tokens = record.cached_tokens
        self.prefill_ms: int | None = None  # from the first step of the sequence until its first token
        self.num_tokens = 0  # in all events so far
        self._has_encoded = False

    def note_item(self, item: StepItem) -> None:
        """Remembers what the first item of a sequence says of the prompt."""
        if item.cached_tokens is not None:
            self.cached_tokens = self.cached_tokens or item.cached_tokens
            self.prefill_ms = item.prefill_ms
        if item.prompt_scores and not self._prompt_scores_sent:
            self._prompt_scores = item.prompt_scores

    def note_record(self, record: Record) -> None:
        """Remembers what the record says of the prompt: the item that said so may not have come."""
        self.cached_tokens = record.cached_tokens or self.cached_tokens

    def next_events(self) -> list[Event]:
        """The events since the last call. The last one of all carries the usage, and the failure if there is one."""
        events: list[Event] = []
        place, token = self._delivery.places[0], self._resume_token() if self._prompt_scores else b""
        while (piece := self._delivery.next_piece()) is not None:
            if self._prompt_scores:
                events += self._prompt_events(place.next_index, token)
            events.append(self._event(piece))
        if self._delivery.ended:
            events[-1].finished.CopyFrom(self._finished())
        self._has_encoded |= bool(events)
        return events

    def place_event(self) -> Event | None:
        """An event without tokens, whose resume token is the place of the client. None if an event has said it."""
        if self._has_encoded:
            return None
        place = self._delivery.places[0]
        return Event(request_id=self._request_id, first_index=place.next_index, resume_token=self._resume_token())

    def _event(self, piece: BranchPiece) -> Event:
        self.num_tokens += len(piece.token_ids)
        event = Event(
            request_id=self._request_id,
            branch=piece.branch,
            first_index=piece.first_index,
            token_ids=piece.token_ids,
            text=piece.text,
            resume_token=self._resume_token(),
        )
        if piece.token_scores:
            event.logprobs.extend(score_to_wire(score) for score in piece.token_scores)
        if piece.finish:
            event.finish_reason = finish_to_wire(piece.finish)
            if (score := self._delivery.score_of(piece.branch)) is not None:
                event.score = score
        return event

    def _prompt_events(self, next_index: int, resume_token: bytes) -> list[Event]:
        """Events with the log probabilities of the prompt alone, which stand before everything else."""
        scores, self._prompt_scores = self._prompt_scores, ()
        self._prompt_scores_sent = True  # a worker that replays the sequence reports them once more
        return [
            Event(
                request_id=self._request_id,
                first_index=next_index,
                prompt_logprobs=[score_to_wire(score) for score in scores[start : start + MAX_PROMPT_SCORES]],
                first_prompt_position=1 + start,
                resume_token=resume_token,
            )
            for start in range(0, len(scores), MAX_PROMPT_SCORES)
        ]

    def _resume_token(self) -> bytes:
        return self._resume_tokens.make_token(self._id_bytes, self._delivery.places, self._tenant)

    def _finished(self) -> inference_pb2.Finished:
        failure, num_output = self._delivery.failure, self._delivery.num_output_tokens()
        return inference_pb2.Finished(
            usage=usage_to_wire(self._prompt_len, num_output, self.cached_tokens),
            failure=failure_to_wire(failure) if failure else None,
        )
