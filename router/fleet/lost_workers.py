"""Which workers this router has lost, and when it tries them again."""

from collections.abc import Collection
from dataclasses import dataclass

from octavo.request.ids import Incarnation

REMEMBER_LOST_S = 15.0  # how long a lost worker is remembered at most
QUIET_S = 60.0  # a worker that was lost longer ago than this is lost for the first time again


@dataclass(slots=True)
class WorkerLoss:
    """A loss of a worker: this router found its process dead, or thought so."""

    lost_at: float
    pause_s: float  # how long the worker is not tried again where it keeps its lease
    lapsed: bool = False  # the store has said since then that the worker has no lease
    is_over: bool = False  # the worker is tried again


class LostWorkers:
    """A router loses a worker when their connection breaks and a probe finds nobody. The worker may live all the same.

    The store shows that it does: a lease runs again that had ended, or runs longer than it can without a renewal. The
    worker is tried again then. Where its lease has never ended, perhaps it is only this router that does not reach it:
    the next loss within QUIET_S lasts twice as long as the one before.
    """

    def __init__(self) -> None:
        self._losses: dict[Incarnation, WorkerLoss] = {}

    def __contains__(self, incarnation: Incarnation) -> bool:
        """Whether that worker is lost, and not tried again yet."""
        loss = self._losses.get(incarnation)
        return loss is not None and not loss.is_over

    def note_loss(self, incarnation: Incarnation, lease_s: float, now: float) -> None:
        """`lease_s`: the length of the worker's lease; 0 if it has not said so."""
        last = self._losses.get(incarnation)
        pause_s = 2 * last.pause_s if last and now - last.lost_at < QUIET_S else lease_s or REMEMBER_LOST_S
        self._losses[incarnation] = WorkerLoss(now, min(pause_s, REMEMBER_LOST_S))

    def note_leases(self, present: Collection[Incarnation], asked_at: float) -> list[Incarnation]:
        """Takes note of which workers have a lease, as the store says that was asked then.

        Returns the workers that are lost no more, because they live or are forgotten.
        """
        found = []
        for incarnation, loss in list(self._losses.items()):
            age_s, has_lease = asked_at - loss.lost_at, incarnation in present
            loss.lapsed |= not has_lease
            lives = has_lease and (loss.lapsed or age_s > loss.pause_s)
            if not loss.is_over and (lives or age_s > REMEMBER_LOST_S):
                loss.is_over = True
                found.append(incarnation)
            if age_s > QUIET_S:
                del self._losses[incarnation]
        return found
