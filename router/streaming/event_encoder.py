"""What a client is sent: the news of its delivery, each with a token to resume from the place after it."""

from collections.abc import Sequence

from octavo import wire
from octavo.errors import Failure
from octavo.record import Record
from octavo.v1 import inference_pb2, types_pb2, worker_pb2
from router.streaming.branch_reader import BranchPiece
from router.streaming.delivery import Delivery
from router.streaming.resume_tokens import ResumeTokens

Event = inference_pb2.GenerateEvent
Logprobs = types_pb2.Logprobs


class EventEncoder:
    """The events of one stream, as messages."""

    def __init__(self, record: Record, delivery: Delivery[Logprobs], tokens: ResumeTokens) -> None:
        self._request_id = record.request_id
        self._id_bytes = record.request_id.encode()
        self._prompt_len = record.prompt_len
        self._delivery = delivery
        self._tokens = tokens
        self._prompt_logprobs: Sequence[Logprobs] = ()
        self._cached_tokens = 0

    def note(self, item: worker_pb2.StepItem) -> None:
        """What a worker says beside the tokens."""
        if item.HasField("cached_tokens"):
            self._cached_tokens = item.cached_tokens
        if item.prompt_logprobs:
            self._prompt_logprobs = item.prompt_logprobs

    def new(self, failure: Failure | None) -> list[Event]:
        """Those since the last call. The last one of all carries the failure, if there is one."""
        events = [self._event(branch, piece, logprobs) for branch, piece, logprobs in self._delivery.shown()]
        if self._delivery.ended:
            events[-1].finished.CopyFrom(self._finished(failure))
        return events

    def _event(self, branch: int, piece: BranchPiece, logprobs: Sequence[Logprobs]) -> Event:
        places = self._delivery.places
        places[branch] = piece.place
        event = Event(
            request_id=self._request_id,
            branch=branch,
            first_index=piece.first_index,
            token_ids=piece.token_ids,
            text=piece.text,
            resume_token=self._tokens.make(self._id_bytes, places),
        )
        if logprobs:
            event.logprobs.extend(logprobs)
        if self._prompt_logprobs and branch == 0:
            event.prompt_logprobs.extend(self._prompt_logprobs)
            self._prompt_logprobs = ()
        if piece.finish:
            event.finish_reason = wire.finish_to_wire(piece.finish)
        return event

    def _finished(self, failure: Failure | None) -> inference_pb2.Finished:
        num_output = self._delivery.num_output_tokens()
        return inference_pb2.Finished(
            usage=wire.usage_to_wire(self._prompt_len, num_output, self._cached_tokens),
            failure=wire.failure_to_wire(failure) if failure else None,
        )
