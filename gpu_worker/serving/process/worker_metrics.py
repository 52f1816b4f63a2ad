"""The metrics of a worker, read from what its parts have counted."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpu_worker.drafting.drafts import DRAFTERS
from gpu_worker.engine.adapter_shelf import AdapterShelf
from gpu_worker.engine.picture_loader import PictureLoader
from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.disk.disk_tier import DiskTier
from gpu_worker.migration.prefix.prefix_fetcher import PrefixFetcher
from gpu_worker.migration.source.migration_progress import MigrationTally
from gpu_worker.migration.standby.standby_buddy import StandbyBuddy
from gpu_worker.migration.standby.standby_owner import StandbyOwner
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.serving.leaving.drain import WorkerDrain
from octavo.metrics.aliases import ModelLoad, alias_values
from octavo.metrics.value import MetricValue


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """A source of metric values. The engine's numbers are those of its last load report, or at most a step old."""

    _watch: WorkerWatch
    _workload: Workload
    _publisher: StepPublisher
    _journal_writer: JournalWriter
    _drain: WorkerDrain
    _tally: MigrationTally
    _shelf: AdapterShelf
    _pictures: PictureLoader
    _fetcher: PrefixFetcher | None
    _standby_owner: StandbyOwner | None = None
    _standby_buddy: StandbyBuddy | None = None
    _disk: DiskTier | None = None

    def values(self) -> Iterator[MetricValue]:
        """All values of now. It reads numbers alone, so the engine does not wait for it."""
        yield from self._load()
        yield from self._steps()
        yield from self._blocks()
        yield from self._prefixes()
        yield from self._standbys()
        yield from self._disk_tier()
        yield from self._ranks()
        yield MetricValue("octavo_adapter_bytes", self._shelf.num_bytes)
        yield MetricValue("octavo_adapter_loads_total", self._shelf.num_loaded)
        yield MetricValue("octavo_picture_bytes", self._pictures.shelf.num_bytes)
        yield MetricValue("octavo_picture_hits_total", self._pictures.num_hits)
        yield MetricValue("octavo_picture_misses_total", self._pictures.num_misses)
        yield MetricValue("octavo_picture_encode_seconds", self._pictures.encode_times)
        journal, drain = self._journal_writer, self._drain
        yield MetricValue("octavo_journal_seconds", journal.append_times)
        yield MetricValue("octavo_journal_tokens_total", journal.num_tokens)
        yield MetricValue("octavo_journal_fenced_total", journal.num_fenced)
        yield from self._tally.values()
        yield MetricValue("octavo_drains_total", drain.num_begun)
        yield MetricValue("octavo_released_total", drain.num_released)
        yield MetricValue("octavo_draining", drain.active)

    def alias_values(self) -> Iterator[MetricValue]:
        """The values of now under the names that gateways know."""
        load, info = self._watch.load, self._workload.info
        yield from alias_values(
            [
                ModelLoad(
                    model=info.model,
                    num_waiting=load.num_waiting,
                    num_running=max(0, load.num_sequences - load.num_waiting - load.num_swapped),
                    num_used_blocks=load.num_used_blocks,
                    num_blocks=self._workload.tables.device.num_blocks,
                    block_size=info.block_size,
                )
            ],
            running=self._shelf.digests,
        )

    def _load(self) -> Iterator[MetricValue]:
        load = self._watch.load
        yield MetricValue("octavo_branches_running", load.num_running)
        yield MetricValue("octavo_sequences", load.num_sequences)
        yield MetricValue("octavo_sequences_waiting", load.num_waiting)
        yield MetricValue("octavo_sequences_swapped", load.num_swapped)
        yield MetricValue("octavo_prefill_tokens_waiting", load.num_prefill_tokens)
        for how, count in (("swap", load.num_preempted_swap), ("recompute", load.num_preempted_recompute)):
            yield MetricValue("octavo_preemptions_total", count, (how,))

    def _steps(self) -> Iterator[MetricValue]:
        times = self._watch.times
        yield MetricValue("octavo_steps_total", times.num_steps)
        yield MetricValue("octavo_steps_failed_total", times.num_failed)
        yield MetricValue("octavo_step_tokens_total", times.num_tokens)
        yield MetricValue("octavo_decodes_total", self._workload.num_decodes)
        for drafter in DRAFTERS:
            yield MetricValue("octavo_drafts_total", self._workload.num_drafts[drafter], (drafter,))
            yield MetricValue("octavo_drafts_accepted_total", self._workload.num_accepted_drafts[drafter], (drafter,))
        for phase, seconds in (("plan", times.plan_s), ("run", times.run_s), ("commit", times.commit_s)):
            yield MetricValue("octavo_step_phase_seconds_total", seconds, (phase,))
        yield MetricValue("octavo_step_seconds", times.step_lengths)
        yield MetricValue("octavo_step_branches", times.batch_sizes)

    def _blocks(self) -> Iterator[MetricValue]:
        load, info = self._watch.load, self._workload.info
        states = (("free", load.num_free_blocks), ("cached", load.num_cached_blocks), ("used", load.num_used_blocks))
        for state, count in states:
            yield MetricValue("octavo_blocks", count, (state,))
        yield MetricValue("octavo_blocks_all", self._workload.tables.device.num_blocks)
        yield MetricValue("octavo_host_blocks", load.num_free_host_blocks, ("free",))
        yield MetricValue("octavo_host_blocks", info.num_host_blocks - load.num_free_host_blocks, ("used",))
        yield MetricValue("octavo_demoted_blocks", self._workload.tables.tier.num_demoted)

    def _prefixes(self) -> Iterator[MetricValue]:
        publisher, block_size = self._publisher, self._workload.info.block_size
        num_fetched = self._fetcher.num_fetched if self._fetcher is not None else 0
        yield MetricValue("octavo_prefix_asked_tokens_total", publisher.num_prompt_tokens)
        yield MetricValue("octavo_prefix_hit_tokens_total", publisher.num_hit_tokens)
        yield MetricValue("octavo_prefix_kept_blocks", self._workload.tables.cache.num_kept)
        yield MetricValue("octavo_prefix_promoted_tokens_total", self._workload.tables.tier.num_promoted * block_size)
        yield MetricValue("octavo_prefix_fetched_tokens_total", num_fetched * block_size)

    def _ranks(self) -> Iterator[MetricValue]:
        for state in self._watch.ranks():
            labels = (str(state.rank),)
            yield MetricValue("octavo_rank_memory_bytes", state.memory_bytes, labels)
            yield MetricValue("octavo_rank_cpu_seconds_total", state.cpu_s, labels)
            yield MetricValue("octavo_rank_wait_seconds_total", state.waited_s, labels)
            yield MetricValue("octavo_rank_silent_seconds", state.silent_s, labels)

    def _standbys(self) -> Iterator[MetricValue]:
        """Numbers of both sides: of the sequences here, and of what is kept for others."""
        owner, buddy, size = self._standby_owner, self._standby_buddy, self._workload.info.block_size
        sequences = owner.sequences if owner is not None else None
        num_sealed, num_held = (sequences.num_sealed_blocks, sequences.num_held_blocks) if sequences else (0, 0)
        yield MetricValue("octavo_standby_sequences", self._watch.num_standby_sequences)
        yield MetricValue("octavo_standby_tokens", size * num_held, ("held",))
        yield MetricValue("octavo_standby_tokens", size * (num_sealed - num_held), ("behind",))
        yield MetricValue("octavo_standby_failed_total", owner.num_failed if owner is not None else 0)
        yield MetricValue("octavo_standby_kept_blocks", self._watch.load.num_standby_blocks)
        yield MetricValue("octavo_standby_refused_total", buddy.num_refused if buddy is not None else 0)
        num_fetched = self._fetcher.num_standby_fetched if self._fetcher is not None else 0
        yield MetricValue("octavo_standby_fetched_tokens_total", size * num_fetched)

    def _disk_tier(self) -> Iterator[MetricValue]:
        """Zeros where there is none: an alert finds them before the first failure."""
        disk, block_size = self._disk, self._workload.info.block_size
        num_written, num_read = (disk.writer.num_written, disk.reader.num_read) if disk is not None else (0, 0)
        num_refused = disk.writer.num_failed + disk.reader.num_failed if disk is not None else 0
        yield MetricValue("octavo_disk_bytes", disk.files.num_bytes if disk is not None else 0)
        yield MetricValue("octavo_disk_written_tokens_total", num_written * block_size)
        yield MetricValue("octavo_disk_read_tokens_total", num_read * block_size)
        damaged = disk.files.num_damaged if disk is not None else 0
        for problem, count in (("damaged", damaged), ("refused", num_refused)):
            yield MetricValue("octavo_disk_failures_total", count, (problem,))
