"""How far a request has come, as one client's stream has seen it: for metrics, the log line at its end, its timeline.

Nothing of what a request says or is answered is kept here: ids, numbers and times alone.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from octavo.metrics.value import MetricValue
from octavo.net.traces import RequestTracer, Span
from octavo.process import telemetry
from octavo.request.errors import ServingError
from octavo.request.ids import SequenceId
from octavo.request.record import Record, SequenceState
from octavo.request.sampling import FinishReason, SamplingParams
from router.streaming.genai_attributes import (
    TEXT_COMPLETION,
    AttributeValue,
    request_attributes,
    response_attributes,
)
from router.streaming.request_tally import DETACHED, LEFT, LOST, ModelTally, RequestTally

log = logging.getLogger(__name__)

CLASSES = {1: "system", 2: "interactive", 3: "default", 4: "bulk"}  # of requests, by their priority
MAX_REMEMBERED = 4096  # requests
MAX_STREAMS_REMEMBERED = 8  # of one request


class SeenEntry(NamedTuple):
    """One thing that a stream has seen of a request, and the name of the worker that it is about."""

    after_ms: int  # after the request was accepted
    what: str
    worker: str


class ModelProgress(NamedTuple):
    """What a router has counted of one model, and the tokens that streams which have not ended have sent."""

    model: str
    tally: ModelTally
    num_under_way: int


class RequestProgress:
    """The progress of one stream. Its session tells it what happens. Times are of the monotonic clock."""

    def __init__(self, record: Record, model: str, tally: RequestTally, arrived_at: float | None) -> None:
        """`arrived_at` is when the request came; None: it was accepted before, and its client attaches to it."""
        self.record = record
        self.arrived_at = arrived_at
        self.began_at = time.monotonic()  # when the store had accepted the request, or the client had attached
        self.waiting_since: float | None = None
        self.placed_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.cached_tokens = 0
        self.num_output_tokens = 0  # delivered here
        self.span: Span | None = None  # None: nobody traces it
        self.worker = ""  # the name of the last one
        self.operation = TEXT_COMPLETION  # of a client that came back it is not known
        self.params: SamplingParams | None = None
        self.finishes: Sequence[FinishReason] = ()  # of its branches, once all have ended
        self.model = model
        self._all = tally
        self._tally = tally.of_model(model)
        self._epochs: dict[int, bool] = {}  # seen here: whether a migration began it
        self._gaps = self._tally.between_tokens
        self._last_token_at = 0.0
        self._accepted_at = self.began_at  # on this process's clock
        self._prefill_ms: int | None = None
        self._first_worker = ""
        if record.state is SequenceState.QUEUED:
            self.waiting_since = arrived_at if arrived_at is not None else self.began_at
        elif record.state is SequenceState.RUNNING:
            self.note_owner(record.epoch, moved=False)

    @property
    def priority_class(self) -> str:
        return CLASSES.get(self.record.priority, "default")

    @property
    def start(self) -> float:
        """The time at which the request arrived, or the client that came back."""
        return self.began_at if self.arrived_at is None else self.arrived_at

    @property
    def num_moves(self) -> int:
        """Changes of the owner by a migration, as far as they were noticed here."""
        return sum(self._epochs.values())

    @property
    def num_retries(self) -> int:
        """Other changes of the owner after the first owner that was noticed here."""
        return max(0, len(self._epochs) - self.num_moves - 1)

    def timeline(self) -> Iterator[SeenEntry]:
        """What this stream has seen and no record has. A stream of a client that came back saw no prompt computed."""
        if self.arrived_at is None:
            yield SeenEntry(self._after_ms(self.began_at), "attached", "")
        elif self.first_token_at is not None:
            if self._prefill_ms is not None:
                started_at = max(self._accepted_at, self.first_token_at - self._prefill_ms / 1000)
                yield SeenEntry(self._after_ms(started_at), "prefill", self._first_worker)
            yield SeenEntry(self._after_ms(self.first_token_at), "first_token", self._first_worker)

    def _after_ms(self, at: float) -> int:
        return max(0, round(1000 * (at - self._accepted_at)))

    def note_begin(self) -> None:
        """The stream begins."""
        if self.arrived_at is None:
            self._all.num_attached += 1
        else:
            self._tally.num_accepted += 1
            if self.record.tenant:
                self._all.tenants.of(self.record.tenant).num_accepted += 1

    def note_owner(self, epoch: int, *, moved: bool) -> None:
        """A worker owns the sequence at this epoch; `moved`: it has it by a migration. The news may come twice."""
        self._epochs[epoch] = moved or self._epochs.get(epoch, False)
        self.waiting_since = None
        if self.placed_at is None:
            self.placed_at = time.monotonic()
            if self.arrived_at is not None:
                self._tally.queued.observe(self.placed_at - self.arrived_at)

    def note_record(self, record: Record) -> None:
        """The record was read."""
        if record.state is SequenceState.RUNNING:
            self.note_owner(record.epoch, moved=bool(record.last_mig))
        elif record.state is SequenceState.QUEUED and self.waiting_since is None:
            self.waiting_since = time.monotonic()

    def note_age(self, age_ms: int) -> None:
        """The request was accepted so long ago, by the store's clock. A stream that began with it need not be told."""
        self._accepted_at = time.monotonic() - age_ms / 1000

    def note_tokens(self, num_tokens: int, prefill_ms: int | None = None) -> None:
        """The client has been sent so many tokens, those included that are sent now. Called for each event.

        `prefill_ms` is how long the worker has needed from its first step to the first token, if it has said so.
        """
        num_new = num_tokens - self.num_output_tokens
        if num_new <= 0:
            return
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at, self._prefill_ms = now, prefill_ms
            self._first_worker = self.worker
            if self.arrived_at is not None:
                self._tally.first_token.observe(now - self.arrived_at)
            self._gaps.observe(0.0, num_new - 1)
        else:
            self._gaps.observe((now - self._last_token_at) / num_new, num_new)
        self._last_token_at = now
        self.num_output_tokens = num_tokens

    def note_end(self, reason: str) -> None:
        """The stream ends. `reason` is why the request has ended, or LEFT or DETACHED if it has not."""
        now = self.ended_at = time.monotonic()
        tally = self._tally
        tally.ends[reason] += 1
        tally.num_output_tokens += self.num_output_tokens
        self._count_for_tenant(has_ended=reason not in (LEFT, DETACHED))
        if reason not in (LEFT, DETACHED):
            tally.num_prompt_tokens += self.record.prompt_len
            tally.num_cached_tokens += self.cached_tokens
            if self.arrived_at is not None:
                tally.total.observe(now - self.arrived_at)
        facts = self._facts(reason, now)
        if self.span is not None:
            is_error = reason in (LOST, "error")
            self.span.end(facts, error=is_error, standard=self._standard_attributes(reason if is_error else ""))
        with telemetry.about(**facts):
            log.info("request %s", "goes on without this stream" if reason in (LEFT, DETACHED) else "has ended")

    def _standard_attributes(self, error: str) -> dict[str, AttributeValue]:
        params = {} if self.params is None else request_attributes(self.params)
        return params | response_attributes(
            operation=self.operation,
            model=self.model,
            request_id=self.record.request_id,
            input_tokens=self.record.prompt_len,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_output_tokens,
            finishes=self.finishes,
            error=error,
        )

    def _count_for_tenant(self, *, has_ended: bool) -> None:
        if self.record.tenant:
            tally = self._all.tenants.of(self.record.tenant)
            tally.num_output_tokens += self.num_output_tokens
            tally.num_prompt_tokens += self.record.prompt_len if has_ended else 0

    def _facts(self, reason: str, now: float) -> dict[str, str | int]:
        record, start = self.record, self.start
        names = {"tenant": record.tenant, "worker": self.worker}
        times = {"queued_ms": self.placed_at, "first_token_ms": self.first_token_at, "total_ms": now}
        return {
            "request": record.request_id,
            "seq": record.seq_id,
            **{name: value for name, value in names.items() if value},
            "model": self.model,
            "class": self.priority_class,
            "end": reason,
            "prompt_tokens": record.prompt_len,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.num_output_tokens,
            **{name: round(1000 * (at - start)) for name, at in times.items() if at is not None},
            "moves": self.num_moves,
            "retries": self.num_retries,
            "attached": int(self.arrived_at is None),
        }


class ProgressRegistry:
    """The progress of the streams that are open here, and of the last ones that were."""

    def __init__(self, tracer: RequestTracer | None = None) -> None:
        """Without a `tracer` there are no spans."""
        self.tally = RequestTally()
        self._tracer = tracer
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

    def timeline(self, seq_id: SequenceId) -> list[SeenEntry]:
        """What streams of the sequence have seen here, of the last MAX_REMEMBERED requests."""
        return [entry for progress in self._recent.get(seq_id, ()) for entry in progress.timeline()]

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


def end_reason(finishes: "list[FinishReason]") -> str:
    """Why a request has ended, of the reasons of its branches: the gravest one."""
    return max(finishes, default=FinishReason.NONE).name.lower()
