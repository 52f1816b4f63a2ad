"""Do blocks come sooner from another worker than by computing their tokens? By what earlier fetches have measured."""

import time
from math import inf

from octavo.request.ids import Incarnation

MOST_S = 2.0  # a sequence waits no longer for blocks of another worker
CALL_S = 0.005  # what a fetch takes beside its bytes: calls, and a step of both engines
LONG_S = 0.5  # a worker that sends nothing for so long does not answer; before, a connection may still be made
FRESH_S = 30.0  # so long a measurement holds. After it a worker that was slow is tried again


class LinkSpeeds:
    """How fast blocks have come from each worker, in bytes per second. Any thread may ask."""

    def __init__(self) -> None:
        self._speeds: dict[Incarnation, tuple[float, float]] = {}  # and when it was measured
        self._silences: dict[Incarnation, tuple[float, float]] = {}  # seconds without a byte, and when that was

    def allowed_s(
        self, owner: Incarnation, num_bytes: int, num_tokens: int, tokens_per_s: float, most_s: float = MOST_S
    ) -> float:
        """How long a fetch of blocks may take. 0.0: to compute their tokens is as fast.

        What is not known does not speak against the attempt, by which it gets known.
        """
        compute_s = num_tokens / tokens_per_s if tokens_per_s > 0 else inf
        speed = self._speed_of(owner)
        copy_s = max(CALL_S, 2 * self._silence_of(owner)) + (num_bytes / speed if speed else inf)
        return min(most_s, compute_s) if copy_s < compute_s else 0.0

    def note_fetch(self, owner: Incarnation, num_bytes: int, seconds: float) -> None:
        """Takes note of a fetch. Of several that hold the fastest counts: what comes in between only makes one slower.

        A worker that sends no byte for LONG_S does not answer, and is not asked again for a while. After a shorter
        silence it is asked for what takes more than twice as long to compute.
        """
        now = time.monotonic()
        if not num_bytes and seconds < LONG_S:
            self._silences[owner] = (max(seconds, self._silence_of(owner)), now)
        else:
            self._silences.pop(owner, None)
            speed, known = num_bytes / max(seconds, 1e-6), self._speed_of(owner)
            if not num_bytes or known == inf or speed > known:
                self._speeds[owner] = (speed, now)
        for measured in (self._speeds, self._silences):
            for other in [each for each, (_, at) in measured.items() if now - at >= FRESH_S]:
                del measured[other]

    def _speed_of(self, owner: Incarnation) -> float:
        """`inf`: it is not known."""
        speed, measured_at = self._speeds.get(owner, (inf, -inf))
        return speed if time.monotonic() - measured_at < FRESH_S else inf

    def _silence_of(self, owner: Incarnation) -> float:
        silence_s, measured_at = self._silences.get(owner, (0.0, -inf))
        return silence_s if time.monotonic() - measured_at < FRESH_S else 0.0
