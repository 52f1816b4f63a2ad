"""Between the Worker service's messages and plain values."""

from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.step import RunnerInfo
from gpu_worker.serving.cache_watchers import CacheEventBatch
from gpu_worker.serving.engine_client import LoadReport, SwapOperation
from gpu_worker.serving.step_subscription import StepItem, StepMessage
from octavo import wire
from octavo.errors import Failure
from octavo.ids import Incarnation
from octavo.sampling import TokenScore
from octavo.v1 import types_pb2, worker_pb2

SWAPS: dict[int, SwapOperation] = {
    worker_pb2.SWAP_OPERATION_OUT: "out",
    worker_pb2.SWAP_OPERATION_IN: "in",
    worker_pb2.SWAP_OPERATION_DROP: "drop",
}


def hello_to_wire(
    worker_id: str, incarnation: Incarnation, info: RunnerInfo, scheduler: Scheduler
) -> worker_pb2.HelloResponse:
    return worker_pb2.HelloResponse(
        worker_id=worker_id,
        incarnation=incarnation,
        schema_revision=wire.SCHEMA_REVISION,
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
        max_batch_tokens=scheduler.budget.tokens,
        max_batch_sequences=scheduler.config.max_batch_sequences,
        device=info.device,
    )


def step_to_wire(step: StepMessage, incarnation: Incarnation) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        step_id=step.step_id,
        incarnation=incarnation,
        items=[item_to_wire(item) for item in step.items],
        unknown_seq_ids=step.unknown,
        num_branches=step.num_branches,
        num_tokens=step.num_tokens,
    )


def item_to_wire(item: StepItem) -> worker_pb2.StepItem:
    message = worker_pb2.StepItem(
        seq_id=item.seq_id,
        epoch=item.epoch,
        branch=item.branch,
        first_index=item.first_index,
        token_ids=item.token_ids,
        chain=item.chain,
    )
    if item.finish:
        message.finish_reason = wire.finish_to_wire(item.finish)
    if item.cumulative_logprob is not None:
        message.cumulative_logprob = item.cumulative_logprob
    if item.cached_tokens is not None:
        message.cached_tokens = item.cached_tokens
    if item.scores:
        message.logprobs.extend(score_to_wire(score) for score in item.scores)
    if item.prompt_scores:
        message.prompt_logprobs.extend(score_to_wire(score) for score in item.prompt_scores)
    if item.failure:
        message.failure.CopyFrom(wire.failure_to_wire(Failure.from_json(item.failure)))
    return message


def score_to_wire(score: TokenScore) -> types_pb2.Logprobs:
    return wire.score_to_wire(score)


def watch_to_wire(
    incarnation: Incarnation,
    report: LoadReport,
    batch: CacheEventBatch,
    *,
    draining: bool,
    snapshot: tuple[bytes, bytes] | None = None,
) -> worker_pb2.WatchResponse:
    """`snapshot` is (device, host) hashes."""
    return worker_pb2.WatchResponse(
        incarnation=incarnation,
        event_seq=batch.event_seq,
        digest=batch.digest,
        snapshot=worker_pb2.KvSnapshot(device_hashes=snapshot[0], host_hashes=snapshot[1]) if snapshot else None,
        events=[event_to_wire(kind, hashes) for kind, hashes in batch.events],
        load=load_to_wire(report, draining=draining),
    )


def event_to_wire(kind: str, hashes: bytes) -> worker_pb2.KvEvent:
    if kind == "cleared":
        return worker_pb2.KvEvent(cleared=True)
    return worker_pb2.KvEvent(stored=hashes) if kind == "stored" else worker_pb2.KvEvent(removed=hashes)


def load_to_wire(report: LoadReport, *, draining: bool) -> worker_pb2.Load:
    load = report.load
    return worker_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_swapped=load.num_swapped,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_used_blocks=load.num_used_blocks,
        num_prefill_tokens=load.num_prefill_tokens,
        step_ms=report.step_s * 1000,
        num_steps=report.num_steps,
        draining=draining,
        num_sequences=load.num_sequences,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        num_free_host_blocks=load.num_free_host_blocks,
        num_preempted_swap=load.num_preempted_swap,
        num_preempted_recompute=load.num_preempted_recompute,
    )
