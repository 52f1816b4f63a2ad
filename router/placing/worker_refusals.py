"""What workers have refused for good: of too long sequences, of adapters, and whether a class of numerics is left."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from octavo.request.errors import Failure, TooLarge
from octavo.request.ids import Incarnation, SequenceId
from router.fleet.limits_registry import LimitsRegistry
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.fleet.worker_pool import WorkerPool
from router.placing.assignment_attempt import AssignmentAttempt

T = TypeVar("T")
SEQUENCES_REMEMBERED = 1024


@dataclass
class WorkerRefusals:
    """Those of the sequences that were assigned here last."""

    pool: WorkerPool
    models: ModelRegistry
    limits: LimitsRegistry
    _by_sequence: OrderedDict[SequenceId, dict[Incarnation, Failure | None]] = field(default_factory=OrderedDict)

    def note(self, attempt: AssignmentAttempt, worker: Incarnation, failure: Failure | None) -> None:
        """The worker can never hold the sequence."""
        attempt.refusals[worker] = failure
        remember(self._by_sequence, attempt.record.seq_id, attempt.refusals)

    def recall(self, attempt: AssignmentAttempt) -> None:
        """Workers that can never hold the sequence are not asked again: each time would cost an epoch."""
        known = self._by_sequence.get(attempt.record.seq_id, {})
        attempt.refusals = {worker: failure for worker, failure in known.items() if self.pool.find_link(worker)}
        attempt.excluded |= set(attempt.refusals)

    def class_to_keep(self, attempt: AssignmentAttempt, model: ServedModel) -> str:
        """The class of numerics in which a sequence with output goes on. Empty: any, because no worker of its own class
        is left that can hold it, as far as this router sees."""
        record, num_tokens = attempt.record, len(attempt.tokens)
        if not record.numerics or not any(record.num_tokens):
            return ""
        gone = attempt.unfit | set(attempt.refusals)
        own = (view for view in self.pool.views(model) if view.numerics == record.numerics)
        fit = (view for view in own if view.stays and view.incarnation not in gone)
        return record.numerics if any(num_tokens < view.prompt_limit for view in fit) else ""

    async def leave_no_worker(self, attempt: AssignmentAttempt) -> bool:
        """Whether neither a worker that is here nor one that was here lately can hold the sequence."""
        if not (attempt.refusals or self.too_large(attempt)):
            return False
        links = [self.pool.find_link(worker) for worker in attempt.refusals]
        refused_by = [link.facts.limits for link in links if link and link.facts]
        return not await self.limits.may_hold(attempt.record.model, len(attempt.tokens), refused_by)

    def too_large(self, attempt: AssignmentAttempt) -> Failure | None:
        model, num_tokens = self.models.find_for_record(attempt.record), len(attempt.tokens)
        views = self.pool.views(model) if model else []
        if not views or any(num_tokens < view.prompt_limit for view in views):
            return None
        limit = max(view.prompt_limit for view in views)
        return TooLarge(f"{num_tokens} tokens so far: the largest worker holds fewer than {limit}").failure()


def remember(entries: OrderedDict[SequenceId, T], seq_id: SequenceId, entry: T) -> None:
    """Notes the latest of a sequence, and forgets the oldest of all where there are too many."""
    entries[seq_id] = entry
    entries.move_to_end(seq_id)
    if len(entries) > SEQUENCES_REMEMBERED:
        entries.popitem(last=False)
