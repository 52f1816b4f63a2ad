"""Who is told of which sequence: the journalled tokens of each sequence here, and the Step streams that follow it.

Lives on the event loop. Plain values only: messages.py turns items into wire messages.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from gpu_worker.plan import TokenScore
from gpu_worker.results import Delta, StepResult
from gpu_worker.sequence import Sequence
from octavo.hashing import extend_chain
from octavo.ids import SequenceId
from octavo.sampling import FinishReason

MAX_PENDING_STEPS = 4096  # a reader this far behind is cut off; it reads the journal and follows again
MAX_STEP_ITEMS = 256  # of what a reader has missed; where branches compete that is an item per token
MAX_REMEMBERED = 4096  # sequences that have ended here, so that a late repetition does not run them again
MAX_WITHHELD_S = 0.1  # how long tokens wait for those of further steps, when several are sent together


@dataclass(slots=True)
class Item:
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


@dataclass(slots=True)
class Step:
    """One message up a stream."""

    step_id: int
    items: list[Item] = field(default_factory=list)
    unknown: list[SequenceId] = field(default_factory=list)
    num_branches: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class BranchLog:
    """What the journal holds of a branch."""

    tokens: list[int]
    chain: int
    finish: FinishReason = FinishReason.NONE
    failure: str = ""
    ended: bool = False  # also when it had ended before this worker: then the record knows how
    # Where branches compete: each item as it was told. A stop string may end the branch at any of them, by its score.
    told: list[Item] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SequenceLog:
    """What the journal holds of a sequence that runs here, and who is told."""

    sequence: Sequence
    branches: list[BranchLog]
    followers: set["Stream"] = field(default_factory=set)
    gone: bool = False

    @property
    def seq_id(self) -> SequenceId:
        return self.sequence.seq_id

    @property
    def epoch(self) -> int:
        return self.sequence.epoch


@dataclass(slots=True, eq=False)
class Stream:
    """One open Step stream. Without a router id it observes everything."""

    router_id: str = ""
    buffer: list[Item] = field(default_factory=list)  # not yet sent: of the step being settled, or withheld
    num_withheld: int = 0  # steps whose items are in the buffer
    urgent: bool = False  # the buffer holds what nobody may wait for: a first token, or an end
    ready: deque[Step] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    num_awaited: int = 0  # finite grants whose steps have not been reported yet
    closing: bool = False
    overflowed: bool = False  # cut off: it gets an error when it reads again, and nothing is kept for it meanwhile

    def push(self, step: Step) -> None:
        if len(self.ready) >= MAX_PENDING_STEPS:
            self.overflowed = True
            self.ready.clear()
        elif not self.overflowed:
            self.ready.append(step)
        self.wake.set()

    def put(self, item: Item) -> None:
        self.buffer.append(item)
        if item.finish or item.cached_tokens is not None:
            self.urgent = True

    def send(self, step_id: int, num_branches: int = 0, num_tokens: int = 0) -> None:
        """The buffer as one message."""
        items = joined(self.buffer) if self.num_withheld > 1 else self.buffer
        self.buffer, self.num_withheld, self.urgent = [], 0, False
        self.push(Step(step_id, items, [], num_branches, num_tokens))

    def end(self) -> None:
        """Sends what is ready and no more."""
        self.closing = True
        self.num_awaited = 0
        self.wake.set()


class Streams:
    """All sequence logs and open streams of this worker. `interval` steps are sent together, ends at once."""

    def __init__(self, interval: int = 1) -> None:
        self.logs: dict[SequenceId, SequenceLog] = {}
        self.open_streams: set[Stream] = set()
        self._interval = interval
        self._routers: dict[str, Stream] = {}
        self._observers: set[Stream] = set()  # open streams without a router id
        self._past: OrderedDict[SequenceId, int] = OrderedDict()  # epochs of those that have ended here
        self._late: asyncio.TimerHandle | None = None
        self._last_step = 0

    # Streams

    def attach(self, stream: Stream) -> None:
        self.open_streams.add(stream)

    def observe(self, stream: Stream) -> None:
        """It is told of every sequence, unless it is a router's."""
        if not stream.router_id:
            self._observers.add(stream)

    def detach(self, stream: Stream) -> None:
        self.open_streams.discard(stream)
        self._observers.discard(stream)
        if self._routers.get(stream.router_id) is stream:
            del self._routers[stream.router_id]
        for entry in self.logs.values():
            entry.followers.discard(stream)

    def name(self, stream: Stream, router_id: str) -> None:
        """Makes it the stream of a router; an older one of the same router ends."""
        older = self._routers.get(router_id)
        if older is not None and older is not stream:
            older.end()
        stream.router_id = router_id
        self._routers[router_id] = stream
        self._observers.discard(stream)

    def end_all(self) -> None:
        """This worker is about to end."""
        for stream in self.open_streams:
            stream.end()

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
            if log.told:
                items += [item for item in log.told if item.first_index + len(item.token_ids) > start or item.finish]
            elif start < len(log.tokens) or log.finish:
                tokens = log.tokens[start:]
                first = min(start, len(log.tokens))
                items.append(Item(seq_id, entry.epoch, branch, first, tokens, log.chain, log.finish, log.failure))
        for first in range(0, len(items), MAX_STEP_ITEMS):  # a reader takes each in without doing anything else
            stream.push(Step(0, items[first : first + MAX_STEP_ITEMS]))

    def unfollow(self, stream: Stream, seq_id: SequenceId) -> None:
        entry = self.logs.get(seq_id)
        if entry is not None:
            entry.followers.discard(stream)

    def revoke(self, stream: Stream, steps: int) -> None:
        """Finite grants it gave have been taken back: their steps will not come."""
        stream.num_awaited = max(0, stream.num_awaited - steps)
        stream.wake.set()

    # Sequences

    def begin(
        self,
        sequence: Sequence,
        prompt_chain: int,
        outputs: Seq[Seq[int]],
        ended_branches: Iterable[int],
        router_id: str,
    ) -> None:
        """Opens the log of an admitted sequence; an older one of the same id is forgotten."""
        self.forget_before(sequence.seq_id, sequence.epoch + 1)
        branches = [BranchLog(list(tokens), extend_chain(prompt_chain, tokens)) for tokens in outputs]
        for branch in ended_branches:
            branches[branch].ended = True
        if sequence.params.ranked:
            for index, log in enumerate(branches):
                log.told.append(Item(sequence.seq_id, sequence.epoch, index, 0, tuple(log.tokens), log.chain))
        entry = self.logs[sequence.seq_id] = SequenceLog(sequence, branches)
        self.add_follower(entry, router_id)
        self._forget_if_ended(entry)

    def add_follower(self, entry: SequenceLog, router_id: str) -> None:
        stream = self._routers.get(router_id) if router_id else None
        if stream is not None:
            entry.followers.add(stream)

    def forget(self, entry: SequenceLog) -> None:
        entry.gone = True
        if self.logs.get(entry.seq_id) is entry:
            del self.logs[entry.seq_id]

    def forget_before(self, seq_id: SequenceId, epoch: int) -> None:
        """Another owner, or a newer epoch here, has taken over from what ran below `epoch`."""
        entry = self.logs.get(seq_id)
        if entry is not None and entry.epoch < epoch:
            self.forget(entry)

    def known_epoch(self, seq_id: SequenceId) -> int | None:
        """The newest epoch that runs here, or has ended here not long ago."""
        entry = self.logs.get(seq_id)
        return entry.epoch if entry is not None else self._past.get(seq_id)

    def current(self, delta: Delta) -> SequenceLog | None:
        """The log a delta goes to; None if its sequence was dropped or replaced, or the branch has ended otherwise."""
        entry = self.logs.get(delta.sequence.seq_id)
        if entry is None or entry.sequence is not delta.sequence or entry.branches[delta.branch_index].ended:
            return None
        return entry

    def accept(self, entry: SequenceLog, delta: Delta) -> None:
        """Records tokens the journal has taken, and tells the followers when the step is flushed."""
        log = entry.branches[delta.branch_index]
        new = delta.token_ids[max(0, len(log.tokens) - delta.first_index) :]
        log.tokens.extend(new)
        log.chain = extend_chain(log.chain, new)
        log.finish, log.failure, log.ended = delta.finish, delta.failure, bool(delta.finish)
        if entry.followers or self._observers or log.told:
            sequence = entry.sequence
            item = Item(
                sequence.seq_id,
                sequence.epoch,
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
            )
            if log.told:
                log.told.append(item)
            self._tell(entry, item)
        if log.ended:
            self._forget_if_ended(entry)

    def end_branch(self, entry: SequenceLog, branch: int) -> None:
        """A router has ended the branch: nothing more of it is told."""
        entry.branches[branch].ended = True
        self._forget_if_ended(entry)

    def fail(self, entry: SequenceLog, failure: str) -> None:
        """Forgets a sequence and tells its followers that what ran of it ended in a way the journal does not know."""
        for branch, log in enumerate(entry.branches):
            if not log.ended:
                first = len(log.tokens)
                item = Item(entry.seq_id, entry.epoch, branch, first, (), log.chain, FinishReason.ERROR, failure)
                self._tell(entry, item)
        self.forget(entry)

    def _forget_if_ended(self, entry: SequenceLog) -> None:
        if all(branch.ended for branch in entry.branches):
            self.forget(entry)
            self._past[entry.seq_id] = entry.epoch
            self._past.move_to_end(entry.seq_id)
            if len(self._past) > MAX_REMEMBERED:
                self._past.popitem(last=False)

    def _tell(self, entry: SequenceLog, item: Item) -> None:
        for stream in entry.followers:
            stream.put(item)
        for stream in self._observers:
            if stream not in entry.followers:
                stream.put(item)

    # Steps

    def flush(self, result: StepResult) -> None:
        """Ends a step: each stream that has enough to say, or counts this step, gets one message."""
        self._last_step = result.step_id
        withheld = False
        for stream in self.open_streams:
            counted = result.granted_by is stream
            if counted:
                stream.num_awaited = max(0, stream.num_awaited - 1)
            elif not stream.buffer:
                continue
            stream.num_withheld += 1
            if counted or stream.urgent or stream.num_withheld >= self._interval:
                stream.send(result.step_id, result.num_branches, result.num_tokens)
            else:
                withheld = True
        for stream in [stream for stream in self.open_streams if stream.overflowed]:
            self.detach(stream)
        if withheld and self._late is None:
            self._late = asyncio.get_running_loop().call_later(MAX_WITHHELD_S, self._flush_late)

    def _flush_late(self) -> None:
        """No further steps have come to be sent together with."""
        self._late = None
        for stream in self.open_streams:
            if stream.num_withheld:
                stream.send(self._last_step)


def joined(items: Iterable[Item]) -> list[Item]:
    """One item for each run of a branch's tokens."""
    runs: dict[tuple[SequenceId, int, int], Item] = {}
    whole: list[Item] = []
    for item in items:
        key = (item.seq_id, item.epoch, item.branch)
        last = runs.get(key)
        if last is None or last.first_index + len(last.token_ids) != item.first_index:
            runs[key] = item = replace(item)
            whole.append(item)
            continue
        last.token_ids = [*last.token_ids, *item.token_ids]
        last.chain, last.finish, last.failure = item.chain, item.finish, item.failure
        last.scores = [*last.scores, *item.scores]
        last.prompt_scores = last.prompt_scores or item.prompt_scores
        if item.cumulative_logprob is not None:
            last.cumulative_logprob = item.cumulative_logprob
    return whole
