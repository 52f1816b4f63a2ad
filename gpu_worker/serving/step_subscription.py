"""One Step stream: what a reader is told, gathered into steps. Plain values: messages.py makes messages of them."""

import asyncio
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from octavo.ids import SequenceId
from octavo.sampling import FinishReason, TokenScore

MAX_PENDING_STEPS = 4096  # a reader this far behind is cut off; it reads the journal and follows again


@dataclass(slots=True)
class StepItem:
    """Committed tokens of one branch, for whoever follows. Several streams may hold the same one."""

    seq_id: SequenceId
    epoch: int
    branch: int
    first_index: int
    token_ids: Seq[int]
    chain: int
    finish: FinishReason = FinishReason.NONE
    failure: str = ""
    scores: Seq[TokenScore] = ()
    prompt_scores: Seq[TokenScore] = ()
    cumulative_logprob: float | None = None
    cached_tokens: int | None = None

    @property
    def end(self) -> int:
        return self.first_index + len(self.token_ids)


@dataclass(slots=True)
class StepMessage:
    """One message up a stream."""

    step_id: int
    items: list[StepItem] = field(default_factory=list)
    unknown: list[SequenceId] = field(default_factory=list)
    num_branches: int = 0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class StepSubscription:
    """One open Step stream. Without a router id it observes everything."""

    router_id: str = ""
    buffer: list[StepItem] = field(default_factory=list)  # not yet sent: of the step being settled, or withheld
    num_withheld: int = 0  # steps whose items are in the buffer
    urgent: bool = False  # the buffer holds what nobody may wait for: a first token, or an end
    ready: deque[StepMessage] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    num_awaited: int = 0  # finite grants whose steps have not been reported yet
    closing: bool = False
    overflowed: bool = False  # cut off: it gets an error when it reads again, and nothing is kept for it meanwhile

    def queue_message(self, message: StepMessage) -> None:
        if len(self.ready) >= MAX_PENDING_STEPS:
            self.overflowed = True
            self.ready.clear()
        elif not self.overflowed:
            self.ready.append(message)
        self.wake.set()

    def add_item(self, item: StepItem) -> None:
        self.buffer.append(item)
        if item.finish or item.cached_tokens is not None:
            self.urgent = True

    def send_buffer(self, step_id: int, num_branches: int = 0, num_tokens: int = 0) -> None:
        """The buffer as one message."""
        items = joined(self.buffer) if self.num_withheld > 1 else self.buffer
        self.buffer, self.num_withheld, self.urgent = [], 0, False
        self.queue_message(StepMessage(step_id, items, [], num_branches, num_tokens))

    def end(self) -> None:
        """Sends what is ready and no more."""
        self.closing = True
        self.num_awaited = 0
        self.wake.set()


def joined(items: Iterable[StepItem]) -> list[StepItem]:
    """One item for each run of a branch's tokens. Where branches compete each token keeps its own: a stop string may
    end the text at any of them, and its score there is the branch's."""
    runs: dict[tuple[SequenceId, int, int], StepItem] = {}
    whole: list[StepItem] = []
    for item in items:
        key = (item.seq_id, item.epoch, item.branch)
        last = runs.get(key)
        if last is None or last.end != item.first_index or item.cumulative_logprob is not None:
            runs[key] = item = replace(item)
            whole.append(item)
            continue
        last.token_ids = [*last.token_ids, *item.token_ids]
        last.chain, last.finish, last.failure = item.chain, item.finish, item.failure
        last.scores = [*last.scores, *item.scores]
        last.prompt_scores = last.prompt_scores or item.prompt_scores
    return whole
