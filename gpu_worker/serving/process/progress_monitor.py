"""Health means progress: a worker whose step loop hangs reports NOT_SERVING, and in the end gives up."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from gpu_worker.engine.engine import Engine
from gpu_worker.serving.process.lease import Lease
from gpu_worker.steps.rank_state import RankState
from octavo.net.health import Health

log = logging.getLogger(__name__)

ROUND_S = 0.1
HANG_LEASES = 10  # a step that takes as long as so many leases counts as a hang
HANG_STATUS = 70
NO_LEASE = "the store has not renewed the lease"


class ProgressMonitor:
    """Compares the time of the step loop's last progress with the lease time, for as long as the worker lives.

    An idle loop, and one that the journal writer holds, make progress too. But a worker whose lease the store has not
    renewed is given nothing by any router: while the store is away, or stalls, health says NOT_SERVING as well.
    """

    def __init__(
        self,
        engine: Engine,
        lease: Lease,
        health: Health,
        lease_s: float,
        ranks: Callable[[], Sequence[RankState]] = tuple,
    ) -> None:
        self._engine = engine
        self._lease = lease
        self._health = health
        self._lease_s = lease_s
        self._ranks = ranks
        self._told = NO_LEASE  # the trouble that was reported last
        self._draining = False

    def set_draining(self, draining: bool) -> None:
        """A worker that drains does not serve, from this call on. After the drain it does so again, a round later."""
        self._draining = draining
        if draining:
            self._report(self._trouble(0.0))

    async def run(self) -> None:
        """Reports SERVING once the store knows the worker, and NOT_SERVING after a lease without progress or renewal.

        Ends the process when the step loop has crashed, or has made no progress for HANG_LEASES lease times. Silence
        is counted in rounds of this task, so time in which the whole process was stopped is not silence of the loop.
        """
        silent_s, seen = 0.0, 0.0
        while True:
            progress = self._engine.last_progress
            silent_s = 0.0 if progress != seen else silent_s + ROUND_S
            seen = progress
            self._report(self._trouble(silent_s))
            self._report_ranks()
            if self._engine.crash is not None:
                give_up(f"the step loop has ended: {self._engine.crash}")
            if silent_s > HANG_LEASES * self._lease_s:
                give_up(f"the step loop hangs ({silent_s:.1f} s without a step)")
            await asyncio.sleep(ROUND_S)

    def _trouble(self, silent_s: float) -> str:
        """Why this worker does not serve; empty if it does."""
        if self._draining:
            return "it drains"
        if silent_s >= self._lease_s:
            return "no step for as long as a lease"
        return "" if self._lease.runs else NO_LEASE

    def _report_ranks(self) -> None:
        """Health has a service `rank/N` for each rank of a group, which serves while the rank says that it lives."""
        for state in self._ranks():
            name, lives = f"rank/{state.rank}", not self._told and state.silent_s < self._lease_s / 2
            if self._health.is_serving(name) != lives:
                self._health.set(name, lives)

    def _report(self, trouble: str) -> None:
        if trouble == self._told:
            return
        self._told = trouble
        self._health.set_all(not trouble)
        if trouble:
            log.warning("%s: this worker does not serve", trouble)
        else:
            log.info("this worker serves")


def give_up(why: str) -> None:
    """Ends the process at once. Other workers take over its sequences, and a supervisor starts it again."""
    log.error("%s: this worker gives up", why)
    os._exit(HANG_STATUS)
