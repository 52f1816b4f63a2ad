"""Which reader is sent which items: the logs of the sequences that run here, and the subscriptions that follow them.

A StepPublisher lives on the event loop.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

from gpu_worker.engine.step_times import StepTimes
from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.journal.sequence_tracer import SequenceTracer
from gpu_worker.journal.step_subscription import MovedSequence, StepMessage, StepSubscription
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.step import StepItems, SubscriptionId
from octavo.request.errors import Failure
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.step_item import StepItem

T = TypeVar("T")

MAX_STEP_ITEMS = 256  # most items of one catch-up message: a router handles a message without letting other tasks run
MAX_REMEMBERED = 4096  # sequences that have ended here, so that a late repetition does not run them again
MAX_WITHHELD_S = 0.1  # how long tokens wait for the tokens of further steps


class StepPublisher:
    """All sequence logs and open subscriptions of this worker.

    The tokens of `interval` steps are sent together. First tokens and ends are sent at once.
    """

    def __init__(self, interval: int = 1, times: StepTimes | None = None, tracer: SequenceTracer | None = None) -> None:
        """`times` know when the first step of a sequence began, and `tracer` is told where its log ends."""
        self.logs: dict[SequenceId, SequenceLog] = {}
        self.num_prompt_tokens = 0  # of the sequences that have brought their first token here; histories count, too
        self.num_hit_tokens = 0  # of these, what the prefix cache had
        self.subscriptions: dict[SubscriptionId, StepSubscription] = {}
        self._interval = interval
        self._times = times
        self._tracer = tracer
        self._routers: dict[str, StepSubscription] = {}
        self._observers: set[StepSubscription] = set()
        self._ended_epochs: OrderedDict[SequenceId, int] = OrderedDict()
        self._moved: OrderedDict[SequenceId, MovedSequence] = OrderedDict()
        self._late_flush: asyncio.TimerHandle | None = None
        self._last_step = 0

    # Subscriptions

    def add_subscription(self, subscription: StepSubscription) -> None:
        """Adds a subscription, which gets nothing before it observes, follows, or has a router id."""
        self.subscriptions[subscription.subscription_id] = subscription

    def remove_subscription(self, subscription: StepSubscription) -> None:
        """Removes a subscription from everything that it followed."""
        self.subscriptions.pop(subscription.subscription_id, None)
        self._observers.discard(subscription)
        if self._routers.get(subscription.router_id) is subscription:
            del self._routers[subscription.router_id]
        for sequence_log in self.logs.values():
            sequence_log.followers.discard(subscription)

    def add_observer(self, subscription: StepSubscription) -> None:
        """Sends the subscription every sequence, unless its reader is a router."""
        if not subscription.router_id:
            self._observers.add(subscription)

    def assign_router(self, subscription: StepSubscription, router_id: str) -> None:
        """Makes the subscription the one of this router. An older subscription of the same router ends.

        What the older one followed is not carried over.
        """
        older = self._routers.get(router_id)
        if older is not None and older is not subscription:
            older.end()
        subscription.router_id = router_id
        self._routers[router_id] = subscription
        self._observers.discard(subscription)

    def follow(self, subscription: StepSubscription, seq_id: SequenceId, next_indexes: Seq[int]) -> None:
        """Sends what is journalled from the given indexes on, and from now on each item of the sequence.

        If the sequence has no log here, the subscription is told that it is unknown, and where it had moved, if it had.
        Both, because a sequence may be on its way back: a reader that knows a newer owner than that one asks again.
        """
        sequence_log = self.logs.get(seq_id)
        if sequence_log is None:
            moved = [self._moved[seq_id]] if seq_id in self._moved else []
            subscription.queue_message(StepMessage(0, unknown=[seq_id], moved=moved))
            return
        sequence_log.followers.add(subscription)
        items = sequence_log.items_from(next_indexes)
        for first in range(0, len(items), MAX_STEP_ITEMS):
            subscription.queue_message(StepMessage(0, items[first : first + MAX_STEP_ITEMS]))

    def unfollow(self, subscription: StepSubscription, seq_id: SequenceId) -> None:
        """Sends the subscription no new item of the sequence."""
        sequence_log = self.logs.get(seq_id)
        if sequence_log is not None:
            sequence_log.followers.discard(subscription)

    def revoke_steps(self, subscription_id: SubscriptionId, num_steps: int) -> None:
        """Takes note that so many granted steps will not run: the engine's grants were taken back."""
        subscription = self.subscriptions.get(subscription_id)
        if subscription is not None:
            subscription.forget_steps(num_steps)

    def end_subscriptions(self) -> None:
        """Ends every stream, because this worker is about to end."""
        for subscription in self.subscriptions.values():
            subscription.end()

    # Sequence logs

    def open_log(
        self,
        sequence: Sequence,
        prompt_chain: int,
        outputs: Seq[Seq[int]],
        ended_branches: Iterable[int],
        router_id: str,
    ) -> SequenceLog:
        """Opens the log of an admitted sequence, which the given router follows.

        Another log of this sequence, of the same or an older epoch, is forgotten. (`Admissions` admits a sequence
        anew at the same epoch only after the older log is gone.)
        """
        self.forget_before(sequence.seq_id, sequence.epoch + 1)
        self._moved.pop(sequence.seq_id, None)
        sequence_log = SequenceLog(sequence, prompt_chain, outputs, ended_branches)
        self.logs[sequence.seq_id] = sequence_log
        self.add_follower(sequence_log, router_id)
        self._forget_if_ended(sequence_log)
        return sequence_log

    def add_follower(self, sequence_log: SequenceLog, router_id: str) -> None:
        """Lets the router's subscription follow the sequence, if the router has one."""
        subscription = self._routers.get(router_id) if router_id else None
        if subscription is not None:
            sequence_log.followers.add(subscription)

    def find_log(self, item: StepItem) -> SequenceLog | None:
        """The log that an item goes to which the engine has just brought; None if its sequence was dropped.

        A log opens before the first item for it arrives, and after the last one of a sequence that it replaces.
        """
        sequence_log = self.logs.get(item.seq_id)
        return sequence_log if sequence_log is not None and sequence_log.epoch == item.epoch else None

    def known_epoch(self, seq_id: SequenceId) -> int | None:
        """The newest epoch at which the sequence runs here, or has ended here not long ago."""
        sequence_log = self.logs.get(seq_id)
        return sequence_log.epoch if sequence_log is not None else self._ended_epochs.get(seq_id)

    def forget_log(self, sequence_log: SequenceLog) -> None:
        """Publishes nothing more of this log. Its followers are told nothing: they learn the reason from the store."""
        if self._tracer is not None and not sequence_log.gone:
            self._tracer.end(sequence_log)
        sequence_log.forget()
        if self.logs.get(sequence_log.seq_id) is sequence_log:
            del self.logs[sequence_log.seq_id]

    def release_log(self, sequence_log: SequenceLog) -> None:
        """Forgets the log of a sequence that this worker has given up. Followers are told that it is not here."""
        for subscription in sequence_log.followers:
            subscription.queue_message(StepMessage(0, unknown=[sequence_log.seq_id]))
        self.forget_log(sequence_log)

    def publish_moved(self, seq_id: SequenceId, epoch: int, owner: Incarnation) -> None:
        """Says that another worker has the sequence at this epoch, after all items of it, and forgets its log.

        A reader that follows the sequence later is told the same, until it is here again.
        """
        sequence_log = self.logs.get(seq_id)
        if sequence_log is not None and sequence_log.epoch >= epoch:
            return  # it is back
        moved = MovedSequence(seq_id, epoch, owner)
        remember(self._moved, seq_id, moved)
        remember(self._ended_epochs, seq_id, epoch)
        if sequence_log is None:
            return
        for subscription in sequence_log.followers | self._observers:
            if subscription.buffer:
                subscription.send_buffer(self._last_step)
            subscription.queue_message(StepMessage(0, moved=[moved]))
        self.forget_log(sequence_log)

    def forget_before(self, seq_id: SequenceId, epoch: int) -> None:
        """Forgets the log of the sequence if the log is of an epoch below `epoch`."""
        sequence_log = self.logs.get(seq_id)
        if sequence_log is not None and sequence_log.epoch < epoch:
            self.forget_log(sequence_log)

    def _forget_if_ended(self, sequence_log: SequenceLog) -> None:
        if sequence_log.ended:
            self.forget_log(sequence_log)
            remember(self._ended_epochs, sequence_log.seq_id, sequence_log.epoch)

    # What happens to a sequence. Readers get it with the next `flush`.

    def publish_item(self, sequence_log: SequenceLog, item: StepItem) -> None:
        """Records tokens that the journal has accepted, for every follower."""
        sequence_log.append_item(item)
        if item.cached_tokens is not None:
            self.num_prompt_tokens += len(sequence_log.sequence.prompt)
            self.num_hit_tokens += item.cached_tokens
            times, key = self._times, (sequence_log.seq_id, sequence_log.epoch)
            start = times.forget_start(*key) if times is not None else None
            item.prefill_ms = None if start is None else round(1000 * (time.perf_counter() - start))
        self._add_item(sequence_log, item)
        if item.finish:
            self._forget_if_ended(sequence_log)

    def publish_failure(self, sequence_log: SequenceLog, failure: Failure) -> None:
        """Ends every running branch for its followers, and forgets the log.

        The failure is in the record, but is not the answer to an append.
        """
        for item in sequence_log.failure_items(failure):
            self._add_item(sequence_log, item)
        self.forget_log(sequence_log)

    def end_branch(self, sequence_log: SequenceLog, branch: int) -> None:
        """Publishes nothing more of a branch: the record says that the branch, or the whole sequence, has ended.

        Followers are told nothing. They learn it from the store: by a notice, or by reading the record.
        """
        sequence_log.branches[branch].ended = True
        self._forget_if_ended(sequence_log)

    def _add_item(self, sequence_log: SequenceLog, item: StepItem) -> None:
        for subscription in sequence_log.followers:
            subscription.add_item(item)
        for subscription in self._observers:
            if subscription not in sequence_log.followers:
                subscription.add_item(item)

    # Steps

    def flush(self, result: StepItems, num_steps: int = 1) -> None:
        """Ends the items of a step: each subscription that has enough to send, or granted the step, gets a message.

        `num_steps` is how many steps brought the items, where the tokens of several were journalled together.
        """
        self._last_step = result.step_id
        withheld = False
        for subscription in self.subscriptions.values():
            granted = result.granted_by == subscription.subscription_id
            if granted:
                subscription.forget_steps(1)
            elif not subscription.buffer:
                continue
            subscription.num_withheld += num_steps
            if granted or subscription.urgent or subscription.num_withheld >= self._interval:
                subscription.send_buffer(result.step_id, result.num_branches, result.num_tokens, is_counted=granted)
            else:
                withheld = True
        for subscription in [each for each in self.subscriptions.values() if each.overflowed]:
            self.remove_subscription(subscription)
        if withheld and self._late_flush is None:
            self._late_flush = asyncio.get_running_loop().call_later(MAX_WITHHELD_S, self._flush_late)

    def _flush_late(self) -> None:
        """Sends what is withheld: no further step came in time to be sent with it."""
        self._late_flush = None
        for subscription in self.subscriptions.values():
            if subscription.num_withheld:
                subscription.send_buffer(self._last_step)


def remember(entries: "OrderedDict[SequenceId, T]", seq_id: SequenceId, entry: T) -> None:
    """Notes the latest of a sequence, and forgets the oldest of all where there are too many."""
    entries[seq_id] = entry
    entries.move_to_end(seq_id)
    if len(entries) > MAX_REMEMBERED:
        entries.popitem(last=False)
