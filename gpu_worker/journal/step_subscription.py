"""One open Step stream: the items that its reader is to get, gathered into messages, as plain values."""

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from gpu_worker.scheduling.state.step import SubscriptionId
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.step_item import StepItem, WaitingItems

MAX_JOINED_MESSAGES = 32
MAX_JOINED_ITEMS = 1024  # a message that has so many is not joined to another: its router handles it in one go
MAX_PENDING_MESSAGES = 4096  # a reader that is so many behind is cut off; it reads the journal and follows again

_numbers = count(1)


class MovedSequence(NamedTuple):
    """A sequence that this worker has handed over, and who has it at which epoch."""

    seq_id: SequenceId
    epoch: int
    owner: Incarnation


@dataclass(slots=True)
class StepMessage:
    """One message of a Step stream. On the wire: octavo.internal.v1.StepResult."""

    step_id: int  # of the last step in it; 0: an answer to Follow, with what earlier steps brought or `unknown`
    items: list[StepItem] = field(default_factory=list)
    unknown: list[SequenceId] = field(default_factory=list)  # sequences that the reader asked for and that have no log
    num_branches: int = 0  # of the last step alone; 0 in a message that was withheld until no further step came
    num_tokens: int = 0  # like num_branches
    moved: list[MovedSequence] = field(default_factory=list)  # after all items that are sent of them here
    is_counted: bool = False  # its step was granted by its reader, which is told of each of these by itself

    @property
    def is_joinable(self) -> bool:
        """Whether the items of other steps may travel with it.

        What must be heard after its items travels alone, and so do scores of prompts, which may be megabytes.
        """
        return not (self.is_counted or self.unknown or self.moved or any(item.prompt_scores for item in self.items))


@dataclass(slots=True, eq=False)
class StepSubscription:
    """The worker's side of one open Step stream. Several subscriptions may hold the same StepItem."""

    subscription_id: SubscriptionId = field(default_factory=lambda: SubscriptionId(next(_numbers)))
    router_id: str = ""  # of the router that reads; empty: the reader has not sent Open
    buffer: list[StepItem] = field(default_factory=list)  # items that are in no message yet
    num_withheld: int = 0  # steps since the oldest item in the buffer
    urgent: bool = False  # the buffer holds an item that must not be withheld: a first token, or an end
    ready: deque[StepMessage] = field(default_factory=deque)  # messages that the server has not sent yet
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set at each change that the server must look at
    num_awaited: int = 0  # steps of this subscription's finite grants that it has not been told of yet
    closing: bool = False  # the stream ends once `ready` is empty
    overflowed: bool = False  # the reader is cut off: it gets an error, and nothing is kept for it

    def add_item(self, item: StepItem) -> None:
        """Puts an item in the buffer, for the next message."""
        self.buffer.append(item)
        if item.finish or item.cached_tokens is not None:  # an end, or the first token of a sequence
            self.urgent = True

    def send_buffer(
        self, step_id: int, num_branches: int = 0, num_tokens: int = 0, *, is_counted: bool = False
    ) -> None:
        """Makes one message of the whole buffer, which may be empty, and queues the message."""
        items = WaitingItems(self.buffer).take_items() if self.num_withheld > 1 else self.buffer
        self.buffer, self.num_withheld, self.urgent = [], 0, False
        self.queue_message(StepMessage(step_id, items, [], num_branches, num_tokens, is_counted=is_counted))

    def queue_message(self, message: StepMessage) -> None:
        """Queues a message for the server to send. A reader that is MAX_PENDING_MESSAGES messages behind is cut off."""
        if len(self.ready) >= MAX_PENDING_MESSAGES:
            self.overflowed = True
            self.ready.clear()
        elif not self.overflowed:
            self.ready.append(message)
        self.wake.set()

    def next_message(self) -> StepMessage:
        """Removes the oldest message that is ready, and for a router the steps that wait behind it, as one message."""
        message = self.ready.popleft()
        if not (self.ready and self.router_id and message.is_joinable):
            return message
        waiting, step_id = WaitingItems(message.items), message.step_id
        for _ in range(MAX_JOINED_MESSAGES - 1):
            if not (self.ready and self.ready[0].is_joinable and len(waiting) < MAX_JOINED_ITEMS):
                break
            message = self.ready.popleft()
            step_id = max(step_id, message.step_id)
            for item in message.items:
                waiting.add(item)
        return replace(message, step_id=step_id, items=waiting.take_items())

    def forget_steps(self, num_steps: int) -> None:
        """Awaits so many granted steps less: the subscription has been told of them, or the grant was taken back."""
        self.num_awaited = max(0, self.num_awaited - num_steps)
        self.wake.set()

    def end(self) -> None:
        """Ends the stream after the messages that are ready; granted steps are not awaited any more."""
        self.closing = True
        self.num_awaited = 0
        self.wake.set()
