"""Who is told of which sequence: the logs of all that runs here, and the Step streams that follow them.

Lives on the event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from gpu_worker.scheduling.sequence import Sequence
from gpu_worker.scheduling.step import Delta, StepResult
from gpu_worker.serving.sequence_log import SequenceLog
from gpu_worker.serving.step_subscription import StepItem, StepMessage, StepSubscription
from octavo.ids import SequenceId

MAX_STEP_ITEMS = 256  # of what a reader has missed; where branches compete that is an item per token
MAX_REMEMBERED = 4096  # sequences that have ended here, so that a late repetition does not run them again
MAX_WITHHELD_S = 0.1  # how long tokens wait for those of further steps, when several are sent together


class StepPublisher:
    """All sequence logs and open streams of this worker. `interval` steps are sent together, ends at once."""

    def __init__(self, interval: int = 1) -> None:
        self.logs: dict[SequenceId, SequenceLog] = {}
        self.subscriptions: set[StepSubscription] = set()
        self._interval = interval
        self._routers: dict[str, StepSubscription] = {}
        self._observers: set[StepSubscription] = set()  # open streams without a router id
        self._past: OrderedDict[SequenceId, int] = OrderedDict()  # epochs of those that have ended here
        self._late: asyncio.TimerHandle | None = None
        self._last_step = 0

    # Streams

    def attach(self, subscription: StepSubscription) -> None:
        self.subscriptions.add(subscription)

    def add_observer(self, subscription: StepSubscription) -> None:
        """It is told of every sequence, unless it is a router's."""
        if not subscription.router_id:
            self._observers.add(subscription)

    def detach(self, subscription: StepSubscription) -> None:
        self.subscriptions.discard(subscription)
        self._observers.discard(subscription)
        if self._routers.get(subscription.router_id) is subscription:
            del self._routers[subscription.router_id]
        for entry in self.logs.values():
            entry.followers.discard(subscription)

    def assign_router(self, subscription: StepSubscription, router_id: str) -> None:
        """Makes it the stream of a router; an older one of the same router ends."""
        older = self._routers.get(router_id)
        if older is not None and older is not subscription:
            older.end()
        subscription.router_id = router_id
        self._routers[router_id] = subscription
        self._observers.discard(subscription)

    def end_subscriptions(self) -> None:
        """This worker is about to end."""
        for subscription in self.subscriptions:
            subscription.end()

    def follow(self, subscription: StepSubscription, seq_id: SequenceId, next_indexes: Seq[int]) -> None:
        """Sends what is journalled from the given indexes on, then everything new."""
        entry = self.logs.get(seq_id)
        if entry is None:
            subscription.queue_message(StepMessage(0, unknown=[seq_id]))
            return
        entry.followers.add(subscription)
        items = entry.items_from(next_indexes)
        for first in range(0, len(items), MAX_STEP_ITEMS):  # a reader takes each in without doing anything else
            subscription.queue_message(StepMessage(0, items[first : first + MAX_STEP_ITEMS]))

    def unfollow(self, subscription: StepSubscription, seq_id: SequenceId) -> None:
        entry = self.logs.get(seq_id)
        if entry is not None:
            entry.followers.discard(subscription)

    def revoke_steps(self, subscription: StepSubscription, steps: int) -> None:
        """Finite grants it gave have been taken back: their steps will not come."""
        subscription.num_awaited = max(0, subscription.num_awaited - steps)
        subscription.wake.set()

    # Sequences

    def open_log(
        self,
        sequence: Sequence,
        prompt_chain: int,
        outputs: Seq[Seq[int]],
        ended_branches: Iterable[int],
        router_id: str,
    ) -> None:
        """Opens the log of an admitted sequence; an older one of the same id is forgotten."""
        self.forget_before(sequence.seq_id, sequence.epoch + 1)
        entry = SequenceLog(sequence, prompt_chain, outputs, ended_branches)
        self.logs[sequence.seq_id] = entry
        self.add_follower(entry, router_id)
        self._forget_if_ended(entry)

    def add_follower(self, entry: SequenceLog, router_id: str) -> None:
        subscription = self._routers.get(router_id) if router_id else None
        if subscription is not None:
            entry.followers.add(subscription)

    def forget_log(self, entry: SequenceLog) -> None:
        entry.gone = True
        if self.logs.get(entry.seq_id) is entry:
            del self.logs[entry.seq_id]

    def forget_before(self, seq_id: SequenceId, epoch: int) -> None:
        """Another owner, or a newer epoch here, has taken over from what ran below `epoch`."""
        entry = self.logs.get(seq_id)
        if entry is not None and entry.epoch < epoch:
            self.forget_log(entry)

    def known_epoch(self, seq_id: SequenceId) -> int | None:
        """The newest epoch that runs here, or has ended here not long ago."""
        entry = self.logs.get(seq_id)
        return entry.epoch if entry is not None else self._past.get(seq_id)

    def find_log(self, delta: Delta) -> SequenceLog | None:
        """The log a delta goes to; None if its sequence was dropped or replaced, or the branch has ended otherwise."""
        entry = self.logs.get(delta.sequence.seq_id)
        if entry is None or entry.sequence is not delta.sequence or entry.branches[delta.branch_index].ended:
            return None
        return entry

    def publish_delta(self, entry: SequenceLog, delta: Delta) -> None:
        """Records tokens the journal has taken, and tells the followers when the step is flushed."""
        self._tell(entry, entry.append(delta))
        if delta.finish:
            self._forget_if_ended(entry)

    def end_branch(self, entry: SequenceLog, branch: int) -> None:
        """A router has ended the branch: nothing more of it is told."""
        entry.branches[branch].ended = True
        self._forget_if_ended(entry)

    def publish_failure(self, entry: SequenceLog, failure: str) -> None:
        """Forgets a sequence and tells its followers that what ran of it ended in a way the journal does not know."""
        for item in entry.failures(failure):
            self._tell(entry, item)
        self.forget_log(entry)

    def _forget_if_ended(self, entry: SequenceLog) -> None:
        if entry.ended:
            self.forget_log(entry)
            self._past[entry.seq_id] = entry.epoch
            self._past.move_to_end(entry.seq_id)
            if len(self._past) > MAX_REMEMBERED:
                self._past.popitem(last=False)

    def _tell(self, entry: SequenceLog, item: StepItem) -> None:
        for subscription in entry.followers:
            subscription.add_item(item)
        for subscription in self._observers:
            if subscription not in entry.followers:
                subscription.add_item(item)

    # Steps

    def flush(self, result: StepResult) -> None:
        """Ends a step: each stream that has enough to say, or counts this step, gets one message."""
        self._last_step = result.step_id
        withheld = False
        for subscription in self.subscriptions:
            counted = result.granted_by is subscription
            if counted:
                subscription.num_awaited = max(0, subscription.num_awaited - 1)
            elif not subscription.buffer:
                continue
            subscription.num_withheld += 1
            if counted or subscription.urgent or subscription.num_withheld >= self._interval:
                subscription.send_buffer(result.step_id, result.num_branches, result.num_tokens)
            else:
                withheld = True
        for subscription in [subscription for subscription in self.subscriptions if subscription.overflowed]:
            self.detach(subscription)
        if withheld and self._late is None:
            self._late = asyncio.get_running_loop().call_later(MAX_WITHHELD_S, self._flush_late)

    def _flush_late(self) -> None:
        """No further steps have come to be sent together with."""
        self._late = None
        for subscription in self.subscriptions:
            if subscription.num_withheld:
                subscription.send_buffer(self._last_step)
