"""How far a request has come, as one client's stream has seen it: for metrics, the log line at its end, its timeline.

Nothing of what a request says or is answered is kept here: ids, numbers and times alone.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octavo.net.traces import Span
from octavo.process import telemetry
from octavo.request.record import Record, SequenceState
from octavo.request.sampling import FinishReason, SamplingParams
from router.streaming.progress.request_tally import DETACHED, LEFT, LOST, RequestTally

log = logging.getLogger(__name__)

CLASSES = {1: "system", 2: "interactive", 3: "default", 4: "bulk"}  # of requests, by their priority
SAID = {LEFT: "is left by this client", DETACHED: "goes on without this stream"}  # of ends that are none
AttributeValue = str | int | float | tuple[str, ...]


class TimelineLine(NamedTuple):
    """One line of the timeline that clients and operators get."""

    after_ms: int  # after the request was accepted
    what: str
    detail: str = ""
    worker: str = ""  # the name of the worker that it is about; empty: none, or not known here


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
        self.called = ""  # by the client, in its own logs
        self.is_chat = False  # of a client that came back it is not known
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
        self._num_drafts = self._num_accepted_drafts = 0  # of the last workers of its branches
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

    def timeline(self) -> Iterator[TimelineLine]:
        """What this stream has seen and no record has. A stream of a client that came back saw no prompt computed."""
        if self.arrived_at is None:
            yield TimelineLine(self._after_ms(self.began_at), "attached")
        elif self.first_token_at is not None:
            if self._prefill_ms is not None:
                started_at = max(self._accepted_at, self.first_token_at - self._prefill_ms / 1000)
                yield TimelineLine(self._after_ms(started_at), "prefill", worker=self._first_worker)
            yield TimelineLine(self._after_ms(self.first_token_at), "first_token", worker=self._first_worker)

        if self._num_drafts and self.ended_at is not None:
            detail = f"{self._num_accepted_drafts} of {self._num_drafts} guessed tokens were right"
            yield TimelineLine(self._after_ms(self.ended_at), "drafts", detail, self.worker)

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
        self._note_placed(time.monotonic())

    def _note_placed(self, now: float) -> None:
        self.waiting_since = None
        if self.placed_at is None:
            self.placed_at = now
            if self.arrived_at is not None:
                self._tally.queued.observe(now - self.arrived_at)

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
        """The client has been sent so many tokens. `prefill_ms`: from the worker's first step to the first token."""
        num_new = num_tokens - self.num_output_tokens
        if num_new <= 0:
            return
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at, self._prefill_ms = now, prefill_ms
            self._first_worker = self.worker
            if self.arrived_at is not None:
                self._note_placed(now)  # by a worker whose answer to that is slower than its first token
                self._tally.first_token.observe(now - self.arrived_at)
            self._gaps.observe(0.0, num_new - 1)
        else:
            self._gaps.observe((now - self._last_token_at) / num_new, num_new)
        self._last_token_at = now
        self.num_output_tokens = num_tokens

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """A branch has ended, for which its last worker has guessed tokens."""
        self._num_drafts += num_drafts
        self._num_accepted_drafts += num_accepted

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
            log.info("request %s", SAID.get(reason, "has ended"))

    def _standard_attributes(self, error: str) -> dict[str, AttributeValue]:
        """What OpenTelemetry's conventions for generative AI ask of a span, for tools that know no names of octavo's.

        Parameters that change nothing are left out, and stop strings, seeds and, as everywhere, prompts and outputs.
        """
        params, asked = self.params, dict[str, AttributeValue]()
        if params is not None:
            asked = {
                "gen_ai.request.max_tokens": params.max_tokens or 0,
                "gen_ai.request.top_k": float(params.top_k),
                "gen_ai.request.frequency_penalty": params.frequency_penalty,
                "gen_ai.request.presence_penalty": params.presence_penalty,
                "gen_ai.request.choice.count": params.n if params.n != 1 else 0,
            }
            asked = {name: value for name, value in asked.items() if value}
            asked |= {"gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p}
        known: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "chat" if self.is_chat else "text_completion",
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.response.id": self.record.request_id,
            "gen_ai.usage.input_tokens": self.record.prompt_len,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.usage.output_tokens": self.num_output_tokens,
        }
        if self.finishes:
            known["gen_ai.response.finish_reasons"] = tuple(finish.name.lower() for finish in self.finishes)
        return asked | known | ({"error.type": error} if error else {})

    def _count_for_tenant(self, *, has_ended: bool) -> None:
        if self.record.tenant:
            tally = self._all.tenants.of(self.record.tenant)
            tally.num_output_tokens += self.num_output_tokens
            tally.num_prompt_tokens += self.record.prompt_len if has_ended else 0

    def _facts(self, reason: str, now: float) -> dict[str, str | int]:
        record, start = self.record, self.start
        names = {"tenant": record.tenant, "worker": self.worker, "called": self.called, "lora": record.lora}
        num_moves = sum(self._epochs.values())  # changes of the owner by a migration, as far as they were noticed here
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
            **({"drafts": self._num_drafts, "right_drafts": self._num_accepted_drafts} if self._num_drafts else {}),
            **{name: round(1000 * (at - start)) for name, at in times.items() if at is not None},
            "moves": num_moves,
            "retries": max(0, len(self._epochs) - num_moves - 1),  # other changes, after the first owner noticed here
            "attached": int(self.arrived_at is None),
        }


def end_reason(finishes: "list[FinishReason]") -> str:
    """Why a request has ended, of the reasons of its branches: the gravest one."""
    return max(finishes, default=FinishReason.NONE).name.lower()
