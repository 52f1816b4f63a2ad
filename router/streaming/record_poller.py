"""When a session reads its record by itself: as soon as possible, at a set time, or after silence.

While a worker's items come, nothing else makes a poll due: each item has passed the journal, so its sender is the owner
and the sequence has not ended. Whoever cancels the sequence or takes it over ends those items, and the store sends a
notice of it; if the notice is lost, silence follows.
"""

from math import inf

SILENCE_S = 1.0  # how long a session may hear nothing from a worker before it reads the record


class RecordPoller:
    """Says when a poll of the record is due. All times are of the monotonic clock, in seconds."""

    def __init__(self, now: float) -> None:
        self.is_due = False
        self._poll_at = inf
        self._last_item = now

    def poll_now(self) -> None:
        self.is_due = True

    def poll_by(self, at: float) -> None:
        """A poll is due at that time, or earlier if it was asked for earlier."""
        self._poll_at = min(self._poll_at, at)

    def note_poll(self) -> None:
        """A poll begins, which serves all that was asked for before."""
        self.is_due, self._poll_at = False, inf

    def note_item(self, now: float) -> None:
        """A worker has sent an item: there is no silence."""
        self._last_item = now

    def update(self, now: float) -> bool:
        """Compares the time with what was asked for and with the silence. Returns whether a poll is due."""
        if now >= self._poll_at:
            self.is_due = True
        elif now - self._last_item > SILENCE_S:
            self._last_item, self.is_due = now, True
        return self.is_due
