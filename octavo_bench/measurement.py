"""What was seen of requests. Times are those of `time.perf_counter`, in seconds: uvloop's own has milliseconds only."""

from dataclasses import dataclass, field

from octavo_bench.endpoints.base import StreamPart, StreamTotals

INTERRUPTED = "interrupted"


@dataclass(slots=True)
class RequestMeasurement:
    """One request, from the moment at which it should have been sent.

    Latencies count from `intended_at`, not from `sent_at`: a request that was sent late, because the generator or the
    endpoint was behind, has waited.
    """

    number: int
    intended_at: float
    wanted_tokens: int
    sent_at: float = 0.0
    first_at: float | None = None  # of the first output
    last_at: float | None = None  # of the last output
    ended_at: float = 0.0
    event_gaps: list[float] = field(default_factory=list)  # between two events with output
    num_events: int = 0  # with output
    num_event_tokens: int | None = 0  # of all events; None once an event did not say how many it has
    totals: StreamTotals | None = None  # as the endpoint says at the end
    texts: list[str] = field(default_factory=list)
    reason: str = ""  # why the request failed, in a few words that many requests share
    message: str = ""  # the same, in the endpoint's own words
    counted_tokens: int | None = None  # by the tokenizer of --tokenizer

    def note_part(self, part: StreamPart, now: float) -> None:
        """Notes an event of the stream. Events without output say only totals."""
        if part.totals is not None:
            self.totals = part.totals
        if not part.text and not part.num_tokens:
            return
        if self.first_at is None:
            self.first_at = now
        if self.last_at is not None:
            self.event_gaps.append(now - self.last_at)
        self.last_at = now
        self.num_events += 1
        if part.num_tokens is None:
            self.num_event_tokens = None
        elif self.num_event_tokens is not None:
            self.num_event_tokens += part.num_tokens
        self.texts.append(part.text)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def completed(self) -> bool:
        return not self.reason

    @property
    def has_failed(self) -> bool:
        """Whether it did not complete, for another reason than Ctrl-C."""
        return self.reason not in ("", INTERRUPTED)

    @property
    def ttft_s(self) -> float | None:
        """The time to the first token; None if none has come."""
        return None if self.first_at is None else self.first_at - self.intended_at

    @property
    def e2e_s(self) -> float:
        """The time to the end of the stream."""
        return self.ended_at - self.intended_at

    @property
    def tpot_s(self) -> float | None:
        """The mean time per output token after the first event's; None with a single event or token."""
        if self.first_at is None or self.last_at is None or self.num_events < 2 or self.output_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.output_tokens - 1)

    @property
    def lateness_s(self) -> float:
        """How much too late the generator sent it."""
        return self.sent_at - self.intended_at

    @property
    def output_tokens(self) -> int:
        return self._count[0]

    @property
    def counted_by(self) -> str:
        """Where the number of output tokens comes from: usage, token_ids, tokenizer, or events (a guess)."""
        return self._count[1]

    @property
    def _count(self) -> tuple[int, str]:
        if self.totals is not None and self.totals.output_tokens is not None:
            return self.totals.output_tokens, "usage"
        if self.num_event_tokens is not None:
            return self.num_event_tokens, "token_ids"
        if self.counted_tokens is not None:
            return self.counted_tokens, "tokenizer"
        return self.num_events, "events"


@dataclass(slots=True)
class RoundMeasurement:
    """All requests of one round on one endpoint, and how busy the generator was meanwhile."""

    number: int
    began_at: float
    ended_at: float
    requests: list[RequestMeasurement]
    cpu_s: float  # of this process
    loop_lags: list[float]  # how much too late the event loop woke a sleeping task
    cut: bool = False  # by Ctrl-C

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at
