"""The exactly-once rule, on the client's side: what has been delivered, and what of an arriving event is new.

Every connection has a cursor of its own per branch. An event must begin where its connection stands: earlier is a
duplicate and dropped with its text, later is a gap. What then lies before the delivered position (the connection began
further back) is cut away: tokens by index, text by counting characters, because the text of a branch is a function of
its journal and the same on every connection that begins at the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.client.events import Event
from octavo.sampling import FinishReason


class BrokenStreamError(Exception):
    """A connection contradicts itself: left something out, or repeats half an event. Attach again."""


# Per branch, always: cursor.index <= delivered.index, cursor.chars <= delivered.chars.
@dataclass(slots=True)
class _BranchPlace:
    index: int  # of the next token
    chars: int = 0


class StreamReceiver:
    """Turns the events of any number of connections, one after the other, into one stream without repetition or gap.

    `starts` are the first indexes wanted, one per branch (missing ones are 0); None: whatever the first event says,
    which is right only for a resume token that somebody else was given. `num_branches` is how many must have ended at
    the end, as far as the caller knows. After a contradiction `resume_token` is empty, where `starts` are known: tokens
    of that connection may stand for events that never came, so the next one begins at the start.
    """

    def __init__(self, starts: Sequence[int] | None = (), num_branches: int = 1) -> None:
        self.starts = starts
        self._num_branches = num_branches
        self.resume_token = b""
        self.done = False
        self._delivered: dict[int, _BranchPlace] = {}
        self._cursor: dict[int, _BranchPlace] = {}
        self._last_token = b""
        self._finished_branches: set[int] = set()
        self._seen_prompt_logprobs = False
        self._caught_up = True  # every cursor stands where its branch has been delivered to

    def restart(self) -> None:
        """A new connection begins at `starts`."""
        self._cursor = {}
        self._last_token = b""
        self._caught_up = not self._delivered

    def resume(self) -> None:
        """A new connection begins after the event that brought `resume_token`."""
        self._cursor = {branch: replace(place) for branch, place in self._delivered.items()}
        self._last_token = self.resume_token
        self._caught_up = True

    def accept(self, event: Event) -> Event | None:
        """What is new in `event`, or None if nothing is. Raises BrokenStreamError on a gap."""
        try:
            return self._accept(event)
        except BrokenStreamError:
            if self.starts is not None:
                self.resume_token = b""
            raise

    def _accept(self, event: Event) -> Event | None:
        if self._is_plain(event):
            self._advance(event, self._cursor[event.branch], False)
            return event
        cursor = self._cursor.setdefault(event.branch, _BranchPlace(self._start(event)))
        if event.first_index > cursor.index:
            raise BrokenStreamError(f"branch {event.branch}: expected index {cursor.index}, got {event.first_index}")
        # Text alone has no index of its own; the place after it tells it from its repetition.
        repeated = not event.token_ids and bool(event.resume_token) and event.resume_token == self._last_token
        if event.first_index < cursor.index:
            if event.first_index + len(event.token_ids) > cursor.index:
                raise BrokenStreamError(f"branch {event.branch}: index {event.first_index} came again with more")
            repeated = True
        if repeated:
            event = replace(event, token_ids=(), text="", logprobs=())
        if event.finished is not None:
            self._check_all_ended(event)
        new = self._cut(event, cursor)
        self._advance(event, cursor, repeated)
        self.done |= event.finished is not None
        return replace(new, resume_token=self.resume_token) if _says_something(new) else None

    def _is_plain(self, event: Event) -> bool:
        """Whether it is new as a whole, as nearly every event is: then there is nothing to cut."""
        cursor = self._cursor.get(event.branch)
        return (
            self._caught_up
            and cursor is not None
            and cursor.index == event.first_index
            and bool(event.token_ids)
            and not (event.finish_reason or event.prompt_logprobs)
            and event.finished is None
        )

    def _check_all_ended(self, last: Event) -> None:
        """A branch whose last events are missing shows no gap in its indexes."""
        if last.finished is None or last.finished.failure:
            return
        ended = self._finished_branches | ({last.branch} if last.finish_reason else set())
        if self.starts is not None and len(ended) < max(self._num_branches, len(self._delivered)):
            raise BrokenStreamError(f"the stream ended, but of its branches only {sorted(ended)}")

    def _start(self, event: Event) -> int:
        if self.starts is None:
            return event.first_index
        return self.starts[event.branch] if event.branch < len(self.starts) else 0

    def _cut(self, event: Event, cursor: _BranchPlace) -> Event:
        """Leaves out what was delivered before."""
        delivered = self._delivered.setdefault(event.branch, replace(cursor))
        skip = delivered.index - cursor.index
        prompt_logprobs = () if self._seen_prompt_logprobs else event.prompt_logprobs
        finish = FinishReason.NONE if event.branch in self._finished_branches else event.finish_reason
        return replace(
            event,
            first_index=delivered.index,
            token_ids=event.token_ids[skip:],
            text=event.text[delivered.chars - cursor.chars :],
            logprobs=event.logprobs[skip:],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
        )

    def _advance(self, event: Event, cursor: _BranchPlace, repeated: bool) -> None:
        delivered = self._delivered[event.branch]
        cursor.index += len(event.token_ids)
        cursor.chars += len(event.text)
        delivered.index = max(delivered.index, cursor.index)
        delivered.chars = max(delivered.chars, cursor.chars)
        if event.finish_reason:
            self._finished_branches.add(event.branch)
        self._seen_prompt_logprobs |= bool(event.prompt_logprobs)
        if not repeated:
            self._last_token = event.resume_token
            self._caught_up = self._caught_up or self._cursor == self._delivered
            if event.resume_token and self._caught_up:
                self.resume_token = event.resume_token


def _says_something(event: Event) -> bool:
    return bool(
        event.token_ids or event.text or event.prompt_logprobs or event.finish_reason or event.finished is not None
    )
