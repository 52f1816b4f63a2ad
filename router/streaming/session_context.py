"""What sessions and their opener are given."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.request.ids import Incarnation, SequenceId
from octavo.store.base import Store
from router.attachment_outbox import AttachmentOutbox
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.placing.dispatcher import Dispatcher
from router.session_registry import SessionRegistry
from router.streaming.request_deadline import DeadlineMargin
from router.streaming.request_progress import ProgressRegistry
from router.streaming.resume_tokens import ResumeTokens
from router.streaming.session_waves import SessionWaves


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The parts of the router that a session needs.

    `router.program` builds one. The opener and each session copy what they need from it.
    """

    store: Store
    router_id: Incarnation
    sessions: SessionRegistry
    pool: WorkerPool
    dispatcher: Dispatcher
    attachments: AttachmentOutbox
    resume_tokens: ResumeTokens
    deadline_margin: DeadlineMargin
    progress: ProgressRegistry
    waves: SessionWaves
    on_taken_over: Callable[[SequenceId, WorkerLink], None]  # a stream that another router may have had is here now
