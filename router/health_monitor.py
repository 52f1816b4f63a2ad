"""The health of a router: SERVING means that a new request would be accepted, and would find a worker or wait for one.

Under the name `resume` it means less: streams can be attached. A full store refuses new requests alone, and what brings
clients to routers must not close the way for the others.
"""

import asyncio
import logging

from octavo.net.health import Health
from octavo.request.errors import StoreUnavailable
from octavo.store.base import Store
from router.fleet.worker_pool import WorkerPool

log = logging.getLogger(__name__)

INFERENCE = "octavo.v1.Inference"
RESUME = "resume"
NO_ANSWER = "the store does not answer"
INTERVAL_S = 0.25
STORE_TIMEOUT_S = 1.25  # with the interval: a store that hangs shows within 1.5 s; a busy one answers long before


class HealthMonitor:
    """Asks the store and looks at the workers, round after round.

    The public listener tells the result for all its services. The Admin listener serves as long as the router runs;
    under the name of the service Inference it tells the result, too, for those who know only that listener.
    """

    def __init__(
        self, store: Store, pool: WorkerPool, public: Health, admin: Health, *, wait_for_workers: bool = False
    ) -> None:
        """With `wait_for_workers` a router without workers serves: its requests wait for the first one."""
        self._store = store
        self._pool = pool
        self._public = public
        self._admin = admin
        self._wait_for_workers = wait_for_workers
        self._trouble = ""  # of the store, as the log says it
        public.set(RESUME, False)
        admin.set(INFERENCE, False)

    async def report(self) -> None:
        """One round, with the pause before the next."""
        trouble = await self._store_trouble()
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("new requests cannot be served: %s", trouble) if trouble else log.info("the store serves again")
        available = self._wait_for_workers or any(link.view().available for link in self._pool.links.values())
        serving = available and not trouble
        self._public.set_all(serving)
        self._public.set(RESUME, available and trouble != NO_ANSWER)
        self._admin.set_all(True)
        self._admin.set(INFERENCE, serving)
        await asyncio.sleep(INTERVAL_S)

    async def _store_trouble(self) -> str:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                accepting = await self._store.accepting()
        except (StoreUnavailable, TimeoutError):
            return NO_ANSWER
        return "" if accepting else "the store has no memory left for them"
