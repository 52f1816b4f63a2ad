"""The spans of a worker: one for each sequence that a traced request brings here."""

from gpu_worker.journal.sequence_log import SequenceLog
from octavo.net import traces
from octavo.net.traces import RequestTracer, Span
from octavo.request.ids import SequenceId

MAX_OPEN = 4096


class SequenceTracer:
    """Spans from the admission of a sequence until nothing more is published of it here. Lives on the event loop."""

    def __init__(self, tracer: RequestTracer, worker_id: str) -> None:
        self._tracer = tracer
        self._worker_id = worker_id
        self._open: dict[tuple[SequenceId, int], Span] = {}

    def begin(self, seq_id: SequenceId, epoch: int, traceparent: str) -> bool:
        """The sequence is about to be admitted; it may have ended before its router has the answer.

        Returns whether this call has begun a span. Without a sampled trace of its router nothing is kept.
        """
        if not traceparent or (seq_id, epoch) in self._open:
            return False
        with traces.caller_trace(traceparent):
            if (span := self._tracer.begin_span("octavo.sequence")) is None:
                return False
        if len(self._open) >= MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._open[seq_id, epoch] = span
        return True

    def drop(self, seq_id: SequenceId, epoch: int) -> None:
        """The sequence was not admitted: its span is not written."""
        self._open.pop((seq_id, epoch), None)

    def end(self, log: SequenceLog) -> None:
        """Nothing more is published of the sequence here: it has ended, moved, or was given up."""
        if (span := self._open.pop((log.seq_id, log.epoch), None)) is not None:
            num_tokens = sum(branch.num_tokens for branch in log.branches)
            facts: dict[str, str | int] = {
                "seq": log.seq_id,
                "epoch": log.epoch,
                "worker": self._worker_id,
                "tokens": num_tokens,
            }
            span.end(facts, error=any(branch.failure is not None for branch in log.branches))
