"""What sessions of this router share, and its services need."""

from dataclasses import dataclass

from octavo.ids import Incarnation
from octavo.store.base import Store
from router.fleet.worker_pool import WorkerPool
from router.placing.dispatcher import Dispatcher
from router.session_registry import SessionRegistry
from router.streaming.resume_tokens import ResumeTokens


@dataclass(frozen=True, slots=True)
class SessionContext:
    """One of each; see program.py."""

    store: Store
    router_id: Incarnation
    sessions: SessionRegistry
    pool: WorkerPool
    dispatcher: Dispatcher
    tokens: ResumeTokens
    attend_s: float  # how often a session makes sure that the store knows it is there
