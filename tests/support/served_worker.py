"""Parts of a worker process for tests, put together as `Worker` does it."""

from scheduler_parts import SchedulerParts

from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.serving.admission.admissions import Admissions
from gpu_worker.serving.admission.prefix_offers import PrefixOffers
from gpu_worker.serving.admission.trial_queue import OwnershipAnnouncer, TrialQueue


def admissions_of(
    parts: SchedulerParts, publisher: StepPublisher, announcer: OwnershipAnnouncer | None = None
) -> Admissions:
    """Admissions to this scheduler, where no other worker has blocks."""
    trials = TrialQueue(parts.port, publisher, announcer)
    offers = PrefixOffers(parts.port, parts.workload, parts.times)
    return Admissions(parts.port, parts.workload, publisher, trials, offers, announcer)
