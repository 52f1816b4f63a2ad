"""From plain values to the messages that only a worker sends. What routers send too is in octavo.wire."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from gpu_worker.blocks.prefix_cache import STORED
from gpu_worker.engine.worker_watch import CLEARED, CacheEvent, CacheEventBatch, WorkerWatch
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.journal.step_subscription import StepMessage
from gpu_worker.migration.source.migration_progress import MigrationOutcome, MigrationProgress
from gpu_worker.scheduling.state.step import SwapOperation
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.rank_state import RankState
from octavo.internal.v1 import worker_pb2
from octavo.model_files.lora_support import LoraSupport
from octavo.pictures.support import PictureSupport
from octavo.request.ids import Incarnation
from octavo.request.record import WorkerRole
from octavo.text.encoded_prompt import EncoderSupport
from octavo.v1 import admin_pb2
from octavo.wire.internal import INTERNAL_REVISION, ROLES, item_to_wire
from octavo.wire.pooling import model_pooling_to_wire
from octavo.wire.public import failure_to_wire, recommended_to_wire

OUTCOMES = {
    MigrationOutcome.MOVED: worker_pb2.MIGRATION_OUTCOME_MOVED,
    MigrationOutcome.STAYED: worker_pb2.MIGRATION_OUTCOME_STAYED,
    MigrationOutcome.ENDED: worker_pb2.MIGRATION_OUTCOME_ENDED,
}
SWAP_OPERATIONS: dict[int, SwapOperation] = {
    worker_pb2.SWAP_OPERATION_OUT: "out",
    worker_pb2.SWAP_OPERATION_IN: "in",
    worker_pb2.SWAP_OPERATION_DROP: "drop",
}


def hello_to_wire(
    worker_id: str,
    incarnation: Incarnation,
    workload: Workload,
    max_batch_tokens: int,
    role: WorkerRole,
    support: LoraSupport,
    pictures: PictureSupport,
    ranks: Sequence[RankState] = (),
) -> worker_pb2.HelloResponse:
    info = workload.info
    return worker_pb2.HelloResponse(
        worker_id=worker_id,
        incarnation=incarnation,
        internal_revision=INTERNAL_REVISION,
        model=info.model,
        model_fingerprint=info.fingerprint,
        block_size=info.block_size,
        kv_dtype=info.kv_dtype,
        kv_layout=info.layout,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        context_tokens=info.context_tokens,
        vocab_size=info.vocab_size,
        tokenizer=info.tokenizer,
        eos_token_ids=info.eos_token_ids,
        max_batch_tokens=max_batch_tokens,
        max_batch_sequences=workload.config.max_batch_sequences,
        device=info.device,
        sampling_defaults=recommended_to_wire(info.sampling_defaults),
        max_sequence_blocks=info.max_sequence_blocks,
        role=ROLES[role],
        numerics=info.numerics,
        pooling=model_pooling_to_wire(info.pooling),
        lora_support=support_to_wire(support),
        picture_support=worker_pb2.PictureSupport(**asdict(pictures)),
        encoder_support=encoder_to_wire(info.encoder) if info.encoder.exists else None,
        ranks=[admin_pb2.WorkerRank(rank=each.rank, host=each.host, pid=each.pid) for each in ranks],
    )


def encoder_to_wire(encoder: EncoderSupport) -> worker_pb2.EncoderSupport:
    speech = None if encoder.speech is None else worker_pb2.SpeechSupport(**asdict(encoder.speech))
    return worker_pb2.EncoderSupport(**asdict(replace(encoder, speech=None)) | {"speech": speech})


def support_to_wire(support: LoraSupport) -> worker_pb2.LoraSupport:
    modules = [
        worker_pb2.LoraModule(name=name, outputs=outputs, inputs=inputs)
        for name, (outputs, inputs) in support.shapes.items()
    ]
    return worker_pb2.LoraSupport(
        refusal=support.refusal,
        num_layers=support.num_layers,
        modules=modules,
        expert_layers=support.expert_layers,
        max_bytes=support.max_bytes,
    )


def step_to_wire(message: StepMessage, incarnation: Incarnation) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        step_id=message.step_id,
        incarnation=incarnation,
        items=[item_to_wire(item) for item in message.items],
        unknown_seq_ids=message.unknown,
        num_branches=message.num_branches,
        num_tokens=message.num_tokens,
        moved=[worker_pb2.MovedSequence(**moved._asdict()) for moved in message.moved],
    )


def migration_to_wire(progress: MigrationProgress) -> worker_pb2.WorkerMigrateResponse:
    error = progress.error
    return worker_pb2.WorkerMigrateResponse(
        outcome=worker_pb2.MIGRATION_OUTCOME_UNSPECIFIED if progress.outcome is None else OUTCOMES[progress.outcome],
        failure=None if error is None else failure_to_wire(error.failure()),
        epoch=progress.epoch,
        target=progress.target,
        rounds=progress.rounds,
        num_blocks=progress.num_blocks,
        num_sent_blocks=progress.num_sent_blocks,
        num_sent_bytes=progress.num_sent_bytes,
        total_ms=progress.total_s * 1000,
        stopped_ms=progress.stopped_s * 1000,
    )


def watch_to_wire(
    incarnation: Incarnation, watch: WorkerWatch, publisher: StepPublisher, batch: CacheEventBatch
) -> worker_pb2.WatchResponse:
    return worker_pb2.WatchResponse(
        incarnation=incarnation,
        event_seq=batch.event_seq,
        digest=batch.digest,
        snapshot=None if batch.snapshot is None else worker_pb2.KvSnapshot(**batch.snapshot._asdict()),
        events=[event_to_wire(event) for event in batch.events],
        load=load_to_wire(watch, publisher),
        adapters=watch.adapters(),
        file_events=[event_to_wire(event) for event in batch.file_events],
    )


def event_to_wire(event: CacheEvent) -> worker_pb2.KvEvent:
    if event.kind == STORED:
        return worker_pb2.KvEvent(stored=event.hashes)
    if event.kind == CLEARED:
        return worker_pb2.KvEvent(cleared=True)
    return worker_pb2.KvEvent(removed=event.hashes)


def load_to_wire(watch: WorkerWatch, publisher: StepPublisher) -> admin_pb2.WorkerLoad:
    times = watch.times
    return admin_pb2.WorkerLoad(
        **asdict(watch.load),
        step_ms=times.step_s * 1000,
        num_steps=times.num_steps,
        draining=watch.draining,
        prefill_tokens_per_s=times.prefill_tokens_per_s,
        step_plan_s=times.plan_s,
        step_run_s=times.run_s,
        step_commit_s=times.commit_s,
        num_step_tokens=times.num_tokens,
        prefix_asked_tokens=publisher.num_prompt_tokens,
        prefix_hit_tokens=publisher.num_hit_tokens,
        num_standby_sequences=watch.num_standby_sequences,
    )
