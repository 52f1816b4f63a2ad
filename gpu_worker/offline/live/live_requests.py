"""Requests that come and go while others run: one thread adds and aborts them, and makes steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from gpu_worker.offline.offline_engine import OfflineEngine
from gpu_worker.offline.offline_request import OfflineRequest
from gpu_worker.offline.outputs import RequestOutput, RequestOutputKind
from gpu_worker.scheduling.state.sequence import Sequence
from octavo.request.errors import InvalidArgument, OutOfBlocks, ServingError
from octavo.request.ids import SequenceId
from octavo.request.sampling import FinishReason
from octavo.request.step_item import StepItem


@dataclass(slots=True, eq=False)
class LiveRequest:
    request_id: str
    request: OfflineRequest
    kind: RequestOutputKind
    sequence: Sequence | None = None  # None: the scheduler's queue had no room yet

    def output(self) -> RequestOutput | None:
        """What there is to say after a step that brought something; None: nothing yet."""
        if self.kind is RequestOutputKind.FINAL_ONLY or self.request.is_ranked:
            return self.request.output(self.request_id) if self.request.ended else None
        return self.request.news(self.request_id, whole=self.kind is RequestOutputKind.CUMULATIVE)


class LiveRequests:
    """Not thread-safe."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self._live: dict[str, LiveRequest] = {}
        self._admitted: dict[SequenceId, LiveRequest] = {}
        self._waiting: list[tuple[int, int, LiveRequest]] = []  # a heap, by priority and then by when they came
        self._num_waited = 0

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._live)

    def add(self, request_id: str, request: OfflineRequest, kind: RequestOutputKind) -> None:
        """Raises InvalidArgument for an id that is in use, and TooLarge for a request that can never run here.

        Where the scheduler's queue is full, a request waits outside, and that it is too large is its failure later.
        """
        if request_id in self._live:
            raise InvalidArgument("request_id", f"{request_id[:64]!r} is that of a request that has not ended")
        live = LiveRequest(request_id, request, kind)
        if not (self._engine.has_room and not self._waiting and self._admit(live)):
            self._num_waited += 1
            heappush(self._waiting, (request.priority, self._num_waited, live))
        self._live[request_id] = live

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests; what they have so far is their last output. Ids of others change nothing."""
        outputs: list[RequestOutput] = []
        for live in [self._live[each] for each in dict.fromkeys(request_ids) if each in self._live]:
            live.request.end(FinishReason.CANCELLED)
            self._forget(live)
            outputs += filter(None, [live.output()])
        return outputs

    def step(self) -> list[RequestOutput]:
        """One step, and what it brought. Raises if the device is broken: then nothing runs here any more."""
        touched = self._admit_waiting()
        for item in self._engine.step().items:
            if live := self._admitted.get(item.seq_id):
                self._add_item(live, item)
                touched[live.request_id] = live
        return [output for live in touched.values() if (output := live.output()) is not None]

    def _add_item(self, live: LiveRequest, item: StepItem) -> None:
        stopped = live.request.add_item(item)
        if live.request.ended:
            self._forget(live)
        elif stopped and live.sequence is not None:
            self._engine.scheduler.end_branch(live.sequence, item.branch)

    def _admit(self, live: LiveRequest) -> bool:
        """False: adapters that are in use leave no room for its own now."""
        try:
            live.sequence = self._engine.admit(live.request)
        except OutOfBlocks:
            return False
        self._admitted[live.sequence.seq_id] = live
        return True

    def _admit_waiting(self) -> dict[str, LiveRequest]:
        """Admits those that have waited for room. Returns those that can never run here: they have ended."""
        ended, passed, without_room = {}, [], set[str]()
        while self._waiting and self._engine.has_room:
            _, _, live = first = heappop(self._waiting)
            if self._live.get(live.request_id) is not live:
                continue  # aborted; another request may have its id now
            digest = live.request.adapter.digest
            if digest in without_room:
                passed.append(first)
                continue
            try:
                if not self._admit(live):
                    without_room.add(digest)
                    passed.append(first)
            except ServingError as error:  # of the request, or of its adapter
                live.request.end(FinishReason.ERROR, error.failure())
                self._forget(live)
                ended[live.request_id] = live
        for each in passed:
            heappush(self._waiting, each)
        return ended

    def _forget(self, live: LiveRequest) -> None:
        if self._live.get(live.request_id) is live:
            del self._live[live.request_id]
        if live.sequence is not None:
            self._engine.scheduler.drop(live.sequence)  # it does not know of an abort, or an end by a stop string
            self._admitted.pop(live.sequence.seq_id, None)
