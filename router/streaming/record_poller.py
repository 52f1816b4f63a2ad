"""When a session has to look at the record by itself: asked to, at a set time, after silence; and its deadline."""

SILENCE_S = 1.0  # how long a session trusts silence


class RecordPoller:
    """Says when. All times are of the monotonic clock, in seconds."""

    def __init__(self, now: float, attend_s: float) -> None:
        self.look = False  # at the record, now
        self.deadline = float("inf")  # of the request
        self._look_at = float("inf")
        self._heard = self._attended = now
        self._attend_s = attend_s

    def look_by(self, at: float) -> None:
        self._look_at = min(self._look_at, at)

    def looked(self) -> None:
        """Nothing that was asked for before is left to be looked at."""
        self.look, self._look_at = False, float("inf")

    def heard(self, now: float) -> None:
        """The worker sends."""
        self._heard = now

    def attended(self, now: float) -> None:
        """The store knows that somebody listens."""
        self._attended = now

    def tick(self, now: float) -> bool:
        """Time has passed; whether there is something to do."""
        if now >= self._look_at:
            self.look = True
        elif now - self._heard > SILENCE_S or now - self._attended > self._attend_s:
            self._heard, self.look = now, True
        return self.look or now >= self.deadline
