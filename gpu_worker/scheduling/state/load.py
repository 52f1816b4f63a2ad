"""How busy this worker is. Routers place sequences by this report."""

from dataclasses import dataclass
from typing import Self

from gpu_worker.scheduling.state.sequence import RUNNING, WAITING
from gpu_worker.scheduling.state.workload import Workload


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of the guesses of one drafter; fields as in octavo.v1.DraftCounts."""

    drafter: str
    num_drafts: int
    num_accepted_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Counts of a workload at one moment between two steps; fields as in octavo.v1.WorkerLoad."""

    num_running: int  # branches
    num_waiting: int
    num_swapped: int
    num_sequences: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_free_host_blocks: int  # those of demoted blocks, too: a swapped-out sequence gets them
    num_demoted_blocks: int  # blocks of the host pool with prefixes that the device has evicted
    num_standby_blocks: int  # blocks that are to be kept for sequences of other workers
    num_prefill_tokens: int
    num_preempted_swap: int
    num_preempted_recompute: int
    num_decodes: int
    drafts: tuple[DraftCounts, ...]

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The load now. Only the engine's thread may call this, because it alone may read the workload."""
        blocks = workload.tables.device
        starting = (b for s in workload.waiting for b in s.branches[: 1 if s.forks else None] if b.state is WAITING)
        to_compute = [*starting, *workload.lists.prefilling]
        return cls(
            num_running=sum(b.state is RUNNING for s in workload.active for b in s.branches),
            num_waiting=len(workload.waiting),
            num_swapped=len(workload.swapped),
            num_sequences=len(workload.sequences),
            num_free_blocks=blocks.num_free,
            num_cached_blocks=blocks.num_cached,
            num_used_blocks=blocks.num_used,
            num_free_host_blocks=workload.tables.tier.num_room,
            num_demoted_blocks=workload.tables.tier.num_demoted,
            num_standby_blocks=len(workload.tables.cache.standby),
            num_prefill_tokens=sum(branch.prefill_end - branch.num_computed for branch in to_compute),
            num_preempted_swap=workload.num_preempted_swap,
            num_preempted_recompute=workload.num_preempted_recompute,
            num_decodes=workload.num_decodes,
            drafts=tuple(
                DraftCounts(drafter, count, workload.num_accepted_drafts[drafter])
                for drafter, count in sorted(workload.num_drafts.items())
            ),
        )
