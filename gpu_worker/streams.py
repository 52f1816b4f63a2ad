"""Who is told of which sequence: the journalled tokens of each sequence here, and the Step streams that follow it.

Lives on the event loop. Plain values only: server.py turns items into wire messages.
"""

import asyncio
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from gpu_worker.plan import TokenScore
from gpu_worker.results import Delta, StepResult
from octavo.hashing import extend_chain
from octavo.ids import SequenceId
from octavo.sampling import FinishReason

MAX_PENDING_STEPS = 4096  # a reader this far behind is cut off; it reads the journal and follows again


@dataclass(slots=True)
class Item:
    """Committed tokens of one branch, for whoever follows."""

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


@dataclass(slots=True)
class Step:
    """One message up a stream."""

    step_id: int
    items: list[Item] = field(default_factory=list)
    unknown: list[SequenceId] = field(default_factory=list)
    num_branches: int = 0
    num_tokens: int = 0
    counted: bool = False  # uses up one of the stream's finite grants


@dataclass(slots=True)
class BranchLog:
    """What the journal holds of a branch."""

    tokens: list[int]
    chain: int
    finish: FinishReason = FinishReason.NONE
    failure: str = ""
    ended: bool = False  # also when it had ended before this worker: then the record knows how


@dataclass(slots=True, eq=False)
class SequenceLog:
    """What the journal holds of a sequence that runs here, and who is told."""

    seq_id: SequenceId
    epoch: int
    branches: list[BranchLog]
    followers: set["Stream"] = field(default_factory=set)
    gone: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """One open Step stream. Without a router id it observes everything."""

    router_id: str = ""
    buffer: list[Item] = field(default_factory=list)  # of the step being settled
    ready: deque[Step] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    num_awaited: int = 0  # finite grants whose steps have not been reported yet
    closing: bool = False
    overflowed: bool = False

    def push(self, step: Step) -> None:
        if len(self.ready) >= MAX_PENDING_STEPS:
            self.overflowed = True
        else:
            self.ready.append(step)
        self.wake.set()


class Streams:
    """All sequence logs and open streams of this worker."""

    def __init__(self) -> None:
        self.logs: dict[SequenceId, SequenceLog] = {}
        self.open_streams: set[Stream] = set()
        self._routers: dict[str, Stream] = {}

    # Streams

    def attach(self, stream: Stream) -> None:
        self.open_streams.add(stream)

    def detach(self, stream: Stream) -> None:
        self.open_streams.discard(stream)
        if self._routers.get(stream.router_id) is stream:
            del self._routers[stream.router_id]
        for entry in self.logs.values():
            entry.followers.discard(stream)

    def name(self, stream: Stream, router_id: str) -> None:
        """Makes it the stream of a router; an older one of the same router ends."""
        older = self._routers.get(router_id)
        if older is not None and older is not stream:
            older.closing = True
            older.wake.set()
        stream.router_id = router_id
        self._routers[router_id] = stream

    def follow(self, stream: Stream, seq_id: SequenceId, next_indexes: Seq[int]) -> None:
        """Sends what is journalled from the given indexes on, then everything new."""
        entry = self.logs.get(seq_id)
        if entry is None:
            stream.push(Step(0, unknown=[seq_id]))
            return
        entry.followers.add(stream)
        items = []
        for branch, log in enumerate(entry.branches):
            start = next_indexes[branch] if branch < len(next_indexes) else 0
            if start < len(log.tokens) or log.finish:
                tokens = log.tokens[start:]
                first = min(start, len(log.tokens))
                items.append(Item(seq_id, entry.epoch, branch, first, tokens, log.chain, log.finish, log.failure))
        if items:
            stream.push(Step(0, items))

    def unfollow(self, stream: Stream, seq_id: SequenceId) -> None:
        entry = self.logs.get(seq_id)
        if entry is not None:
            entry.followers.discard(stream)

    # Sequences

    def begin(
        self,
        seq_id: SequenceId,
        epoch: int,
        prompt_chain: int,
        outputs: Seq[Seq[int]],
        ended_branches: Seq[int],
        router_id: str,
    ) -> SequenceLog:
        """Opens the log of an admitted sequence; one of an older epoch is forgotten."""
        older = self.logs.get(seq_id)
        if older is not None:
            self.forget(older)
        branches = [BranchLog(list(tokens), extend_chain(prompt_chain, tokens)) for tokens in outputs]
        for branch in ended_branches:
            branches[branch].ended = True
        entry = self.logs[seq_id] = SequenceLog(seq_id, epoch, branches)
        self.add_follower(entry, router_id)
        return entry

    def add_follower(self, entry: SequenceLog, router_id: str) -> None:
        stream = self._routers.get(router_id) if router_id else None
        if stream is not None:
            entry.followers.add(stream)

    def forget(self, entry: SequenceLog) -> None:
        entry.gone = True
        if self.logs.get(entry.seq_id) is entry:
            del self.logs[entry.seq_id]

    def current(self, delta: Delta) -> SequenceLog | None:
        """The log a delta belongs to, unless it has been dropped or replaced by a newer epoch."""
        entry = self.logs.get(delta.sequence.seq_id)
        return entry if entry is not None and entry.epoch == delta.sequence.epoch else None

    def accept(self, entry: SequenceLog, delta: Delta) -> None:
        """Records tokens the journal has taken, and tells the followers when the step is flushed."""
        log = entry.branches[delta.branch_index]
        new = delta.token_ids[max(0, len(log.tokens) - delta.first_index) :]
        log.tokens.extend(new)
        log.chain = extend_chain(log.chain, new)
        log.finish, log.failure, log.ended = delta.finish, delta.failure, bool(delta.finish)
        self._tell(
            entry,
            Item(
                entry.seq_id,
                entry.epoch,
                delta.branch_index,
                delta.first_index,
                delta.token_ids,
                log.chain,
                log.finish,
                log.failure,
                delta.scores,
                delta.prompt_scores,
                delta.cumulative_logprob,
                delta.cached_tokens,
            ),
        )
        self.forget_if_ended(entry)

    def end_branch(self, entry: SequenceLog, branch: int) -> None:
        """A router has ended the branch: nothing more of it is told."""
        entry.branches[branch].ended = True
        self.forget_if_ended(entry)

    def forget_if_ended(self, entry: SequenceLog) -> None:
        if all(branch.ended for branch in entry.branches):
            self.forget(entry)

    def fail(self, entry: SequenceLog, branch: int, failure: str) -> None:
        """Tells the followers that a branch ended in a way the journal does not know."""
        log = entry.branches[branch]
        first = len(log.tokens)
        self._tell(entry, Item(entry.seq_id, entry.epoch, branch, first, (), log.chain, FinishReason.ERROR, failure))

    def flush(self, result: StepResult) -> None:
        """Ends a step: each stream that has items, observes, or counts steps gets one message."""
        for stream in self.open_streams:
            counted = stream.num_awaited > 0
            if stream.buffer or counted or (not stream.router_id and result.deltas):
                items, stream.buffer = stream.buffer, []
                step = Step(result.step_id, items, [], result.num_branches, result.num_tokens, counted)
                stream.num_awaited -= counted
                stream.push(step)

    def _tell(self, entry: SequenceLog, item: Item) -> None:
        for stream in entry.followers:
            stream.buffer.append(item)
        for stream in self.open_streams:
            if not stream.router_id and stream not in entry.followers:
                stream.buffer.append(item)
