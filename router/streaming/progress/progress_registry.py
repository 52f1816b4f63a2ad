"""The progress of all streams here: the source of metrics, and of the timeline of a request.

A timeline is what its record says, and what streams on this router have seen. The record survives every process. What
streams have seen (`prefill`, `first_token`, `attached`) is lost with the router that carried them, and other routers do
not know it: it would cost a write per request to keep it.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import groupby
from math import inf
from typing import NamedTuple

from octavo.metrics.value import MetricValue
from octavo.net.traces import RequestTracer
from octavo.process import telemetry
from octavo.request.errors import ServingError
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Record
from router.streaming.progress.request_progress import CLASSES, RequestProgress, TimelineLine
from router.streaming.progress.request_tally import ModelTally, RequestTally

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096  # requests
MAX_STREAMS_REMEMBERED = 8  # of one request


class ModelProgress(NamedTuple):
    """What a router has counted of one model, and the tokens that streams which have not ended have sent."""

    model: str
    tally: ModelTally
    num_under_way: int


class ProgressRegistry:
    """The progress of the streams that are open here, and of the last ones that were."""

    def __init__(self, tracer: RequestTracer | None, name_of: Callable[[Incarnation], str]) -> None:
        """Without a `tracer` there are no spans. `name_of`: the name of a worker that was met here, or nothing."""
        self.tally = RequestTally()
        self._tracer = tracer
        self._name_of = name_of
        self._open: set[RequestProgress] = set()
        self._recent: OrderedDict[SequenceId, list[RequestProgress]] = OrderedDict()

    def begin(self, progress: RequestProgress) -> None:
        """A stream begins."""
        self._open.add(progress)
        progress.note_begin()
        if self._tracer is not None:
            progress.span = self._tracer.begin_span("octavo.request", time.monotonic() - progress.start)
        streams = self._recent.setdefault(progress.record.seq_id, [])
        streams.append(progress)
        del streams[1 : 1 + len(streams) - MAX_STREAMS_REMEMBERED]  # the first one saw the first token
        self._recent.move_to_end(progress.record.seq_id)
        if len(self._recent) > MAX_REMEMBERED:
            self._recent.popitem(last=False)

    def end(self, progress: RequestProgress, reason: str) -> None:
        """A stream ends, for the reason that `note_end` is told."""
        self._open.discard(progress)
        progress.note_end(reason)

    def traceparent_of(self, seq_id: SequenceId) -> str:
        """The text that makes a worker's span a child of the stream's; empty if no stream of it is traced here."""
        spans = (progress.span for progress in self._recent.get(seq_id, ()) if progress.ended_at is None)
        return next((span.traceparent for span in spans if span is not None), "")

    def timeline(self, record: Record) -> list[TimelineLine]:
        """All that is known here of a request, oldest first: what streams have seen of the last MAX_REMEMBERED alone.

        The clocks of two processes differ a little: no token comes before the first owner, and none after the end.
        """
        told = [TimelineLine(*entry, worker=self._worker_in(entry.detail)) for entry in record.timeline]
        owned_ms = min((line.after_ms for line in told if line.what == "taken"), default=0)
        ended_ms = min((line.after_ms for line in told if line.what == "ended"), default=inf)
        for progress in self._recent.get(record.seq_id, ()):
            for line in progress.timeline():
                after_ms = line.after_ms
                if line.what != "attached":
                    after_ms = int(min(max(after_ms, owned_ms), ended_ms))
                told.append(line._replace(after_ms=after_ms))
        return sorted(told, key=lambda line: (line.after_ms, line.what == "ended"))

    def _worker_in(self, detail: str) -> str:
        first, _, _ = detail.partition(" ")
        return self._name_of(Incarnation(first)) if first else ""

    def count_refusal(self, error: ServingError, tenant: str = "") -> None:
        """A request was refused before it was accepted."""
        self.tally.refusals[error.reason] += 1
        if tenant:
            self.tally.tenants.of(tenant).refusals[error.reason] += 1
        with telemetry.about(end="refused", reason=error.reason):
            log.info("request refused")

    def values(self) -> Iterator[MetricValue]:
        """A source of metric values."""
        now, waiting = time.monotonic(), [each for each in self._open if each.waiting_since is not None]
        yield MetricValue("octavo_streams", len(self._open))
        yield MetricValue("octavo_waiting_tenants", len({each.record.tenant for each in waiting}))
        for name in CLASSES.values():
            ages = [now - (each.waiting_since or now) for each in waiting if each.priority_class == name]
            yield MetricValue("octavo_waiting_requests", len(ages), (name,))
            yield MetricValue("octavo_waiting_oldest_seconds", max(ages, default=0.0), (name,))
        yield from self.tally.values(dict(self._under_way()))
        yield from self.tally.tenants.values(Counter(each.record.tenant for each in self._open))

    def stream_states(self) -> Counter[tuple[str, bool]]:
        """How many streams are open, by the model and by whether the request waits for a worker."""
        return Counter((each.model, each.waiting_since is not None) for each in self._open)

    def adapters(self) -> Iterator[tuple[str, str, bool]]:
        """Of the open streams with adapters: model, digest, and whether the request waits for a worker."""
        for each in self._open:
            if each.record.lora:
                yield each.model, each.record.lora, each.waiting_since is not None

    @property
    def num_streams(self) -> int:
        """The streams that are open."""
        return len(self._open)

    def models(self) -> Iterator[ModelProgress]:
        """What was counted so far, by model."""
        under_way = dict(self._under_way())
        for model, tally in self.tally.models.items():
            yield ModelProgress(model, tally, under_way.get(model, 0))

    def _under_way(self) -> Iterator[tuple[str, int]]:
        """The tokens that streams which are open have sent, by model."""
        for model, group in groupby(sorted(self._open, key=lambda each: each.model), key=lambda each: each.model):
            yield model, sum(each.num_output_tokens for each in group)
