"""Passes each event on once: knows what has been delivered, and what is new in an arriving event.

The receiver keeps two places per branch: how far this connection has come (received), and how far the caller has come
over all connections (delivered). An event must begin at the received place. One that begins earlier is a duplicate and
is dropped with its text; one that begins later shows a gap. A connection may begin further back than the delivered
place. The part between the two is cut away: tokens by index, text by counting characters, because the text of a branch
is a function of its journal, and so is equal on every connection that begins at the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.client.events import Event
from octavo.request.sampling import FinishReason


class BrokenStreamError(Exception):
    """The events of a connection have a gap, or repeat an event with more tokens. Attach again."""


# In every branch: received.index <= delivered.index, and received.chars <= delivered.chars.
@dataclass(slots=True)
class _BranchPlace:
    """How far a stream has come in one branch: tokens, and characters of text."""

    index: int  # the index of the next token
    chars: int = 0


class StreamReceiver:
    """Turns the events of several connections, one after the other, into one stream without repetition or gap.

    `starts` are the first indexes that the caller wants, one per branch; a missing one is 0. With None the first event
    decides, which is right only for a resume token of another process. At least `num_branches` must have ended when the
    stream ends. After a contradiction, if `starts` are known, `resume_token` is empty and the next connection begins at
    the start: a resume token of the broken connection may stand for events that never arrived.
    """

    def __init__(self, starts: Sequence[int] | None = (), num_branches: int = 1) -> None:
        self.starts = starts
        self._num_branches = num_branches
        self.resume_token = b""
        self.done = False
        self._delivered: dict[int, _BranchPlace] = {}
        self._received: dict[int, _BranchPlace] = {}
        self._last_token = b""
        self._finished_branches: set[int] = set()
        self._next_prompt_position = 1  # the first token of a prompt has no log probability
        self._caught_up = True  # received and delivered are equal in every branch

    def restart(self) -> None:
        """Begins a connection that starts at `starts`."""
        self._received = {}
        self._last_token = b""
        self._caught_up = not self._delivered

    def resume(self) -> None:
        """Begins a connection that starts after the event with `resume_token`, or at `next_indexes`."""
        self._received = {branch: replace(place) for branch, place in self._delivered.items()}
        self._last_token = self.resume_token
        self._caught_up = True

    def next_indexes(self) -> list[int] | None:
        """The next index of each branch, to attach without a token. None if the caller began with a token."""
        if self.starts is None:
            return None
        count = max(len(self.starts), *(branch + 1 for branch in self._delivered), 0)
        places = [self._delivered.get(branch) for branch in range(count)]
        return [
            place.index if place else (self.starts[branch] if branch < len(self.starts) else 0)
            for branch, place in enumerate(places)
        ]

    def accept(self, event: Event) -> Event | None:
        """The new part of `event`; None if nothing in it is new. Raises BrokenStreamError on a gap."""
        try:
            return self._accept(event)
        except BrokenStreamError:
            if self.starts is not None:
                self.resume_token = b""
            raise

    def _accept(self, event: Event) -> Event | None:
        if self._is_plain(event):
            self._advance(event, self._received[event.branch], False)
            return event
        received = self._received.setdefault(event.branch, _BranchPlace(self._start(event)))
        if event.first_index > received.index:
            raise BrokenStreamError(f"branch {event.branch}: expected index {received.index}, got {event.first_index}")
        # Text without tokens has no index of its own. Its resume token tells it from its repetition.
        repeated = not event.token_ids and bool(event.resume_token) and event.resume_token == self._last_token
        if event.first_index < received.index:
            if event.first_index + len(event.token_ids) > received.index:
                raise BrokenStreamError(f"branch {event.branch}: index {event.first_index} came again with more")
            repeated = True
        if repeated:
            event = replace(event, token_ids=(), text="", logprobs=())
        if event.finished is not None:
            self._check_all_ended(event)
        new = self._cut(event, received)
        self._advance(event, received, repeated)
        self.done |= event.finished is not None
        told = new.token_ids or new.text or new.prompt_logprobs or new.finish_reason or new.finished is not None
        return replace(new, resume_token=self.resume_token) if told else None

    def _is_plain(self, event: Event) -> bool:
        """Whether the whole event is new, as nearly every event is. Then nothing is cut away."""
        received = self._received.get(event.branch)
        return (
            self._caught_up
            and received is not None
            and received.index == event.first_index
            and bool(event.token_ids)
            and not (event.finish_reason or event.prompt_logprobs)
            and event.finished is None
        )

    def _check_all_ended(self, last: Event) -> None:
        """Raises BrokenStreamError if a branch has not ended: missing last events show no gap in the indexes."""
        if last.finished is None or last.finished.failure:
            return
        ended = self._finished_branches | ({last.branch} if last.finish_reason else set())
        if self.starts is not None and len(ended) < max(self._num_branches, len(self._delivered)):
            raise BrokenStreamError(f"the stream ended, but of its branches only {sorted(ended)}")

    def _start(self, event: Event) -> int:
        if self.starts is None:
            return event.first_index
        return self.starts[event.branch] if event.branch < len(self.starts) else 0

    def _cut(self, event: Event, received: _BranchPlace) -> Event:
        """The event without the tokens and the text that the caller has already."""
        delivered = self._delivered.setdefault(event.branch, replace(received))
        skip = delivered.index - received.index
        first_position = max(event.first_prompt_position, 1)
        if event.prompt_logprobs and first_position > self._next_prompt_position:
            raise BrokenStreamError(f"the prompt: expected position {self._next_prompt_position}, got {first_position}")
        prompt_logprobs = event.prompt_logprobs[self._next_prompt_position - first_position :]
        ended = event.branch in self._finished_branches  # then its last text has no tokens, and may come again
        finish = FinishReason.NONE if ended else event.finish_reason
        return replace(
            event,
            first_index=delivered.index,
            token_ids=event.token_ids[skip:],
            text="" if ended else event.text[delivered.chars - received.chars :],
            logprobs=event.logprobs[skip:],
            prompt_logprobs=prompt_logprobs,
            first_prompt_position=self._next_prompt_position if prompt_logprobs else 0,
            finish_reason=finish,
        )

    def _advance(self, event: Event, received: _BranchPlace, repeated: bool) -> None:
        delivered = self._delivered[event.branch]
        received.index += len(event.token_ids)
        received.chars += len(event.text)
        delivered.index = max(delivered.index, received.index)
        delivered.chars = max(delivered.chars, received.chars)
        if event.finish_reason:
            self._finished_branches.add(event.branch)
        if event.prompt_logprobs:
            end = max(event.first_prompt_position, 1) + len(event.prompt_logprobs)
            self._next_prompt_position = max(self._next_prompt_position, end)
        if not repeated:
            self._last_token = event.resume_token
            self._caught_up = self._caught_up or self._received == self._delivered
            if event.resume_token and self._caught_up:
                self.resume_token = event.resume_token
