from octavo.v1 import inference_pb2 as _inference_pb2
from octavo.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_BOTH: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class MoveKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_KIND_UNSPECIFIED: _ClassVar[MoveKind]
    MOVE_KIND_MIGRATED: _ClassVar[MoveKind]
    MOVE_KIND_TAKEN_OVER: _ClassVar[MoveKind]
    MOVE_KIND_REPLACED: _ClassVar[MoveKind]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_BOTH: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
MOVE_KIND_UNSPECIFIED: MoveKind
MOVE_KIND_MIGRATED: MoveKind
MOVE_KIND_TAKEN_OVER: MoveKind
MOVE_KIND_REPLACED: MoveKind

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "router_id", "num_queued")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    router_id: str
    num_queued: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., router_id: _Optional[str] = ..., num_queued: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "incarnation", "endpoint", "model", "model_fingerprint", "device", "block_size", "kv_dtype", "kv_layout", "num_blocks", "num_host_blocks", "context_tokens", "max_batch_tokens", "max_batch_sequences", "internal_revision", "load", "load_age_ms", "available", "reason", "pid", "role", "numerics", "ranks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    endpoint: str
    model: str
    model_fingerprint: str
    device: str
    block_size: int
    kv_dtype: str
    kv_layout: str
    num_blocks: int
    num_host_blocks: int
    context_tokens: int
    max_batch_tokens: int
    max_batch_sequences: int
    internal_revision: int
    load: WorkerLoad
    load_age_ms: int
    available: bool
    reason: str
    pid: int
    role: WorkerRole
    numerics: str
    ranks: _containers.RepeatedCompositeFieldContainer[WorkerRank]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., endpoint: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., device: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., context_tokens: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_batch_sequences: _Optional[int] = ..., internal_revision: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., load_age_ms: _Optional[int] = ..., available: bool = ..., reason: _Optional[str] = ..., pid: _Optional[int] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., numerics: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[WorkerRank, _Mapping]]] = ...) -> None: ...

class WorkerRank(_message.Message):
    __slots__ = ("rank", "host", "pid")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    pid: int
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_swapped", "num_free_blocks", "num_cached_blocks", "num_used_blocks", "num_prefill_tokens", "step_ms", "num_steps", "draining", "num_sequences", "prefill_tokens_per_s", "num_free_host_blocks", "num_preempted_swap", "num_preempted_recompute", "step_plan_s", "step_run_s", "step_commit_s", "num_step_tokens", "prefix_asked_tokens", "prefix_hit_tokens", "num_demoted_blocks", "num_decodes", "drafts", "num_standby_sequences", "num_standby_blocks")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_SWAP_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    STEP_PLAN_S_FIELD_NUMBER: _ClassVar[int]
    STEP_RUN_S_FIELD_NUMBER: _ClassVar[int]
    STEP_COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STANDBY_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_STANDBY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_swapped: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_prefill_tokens: int
    step_ms: float
    num_steps: int
    draining: bool
    num_sequences: int
    prefill_tokens_per_s: float
    num_free_host_blocks: int
    num_preempted_swap: int
    num_preempted_recompute: int
    step_plan_s: float
    step_run_s: float
    step_commit_s: float
    num_step_tokens: int
    prefix_asked_tokens: int
    prefix_hit_tokens: int
    num_demoted_blocks: int
    num_decodes: int
    drafts: _containers.RepeatedCompositeFieldContainer[DraftCounts]
    num_standby_sequences: int
    num_standby_blocks: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., step_ms: _Optional[float] = ..., num_steps: _Optional[int] = ..., draining: bool = ..., num_sequences: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., num_free_host_blocks: _Optional[int] = ..., num_preempted_swap: _Optional[int] = ..., num_preempted_recompute: _Optional[int] = ..., step_plan_s: _Optional[float] = ..., step_run_s: _Optional[float] = ..., step_commit_s: _Optional[float] = ..., num_step_tokens: _Optional[int] = ..., prefix_asked_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., num_demoted_blocks: _Optional[int] = ..., num_decodes: _Optional[int] = ..., drafts: _Optional[_Iterable[_Union[DraftCounts, _Mapping]]] = ..., num_standby_sequences: _Optional[int] = ..., num_standby_blocks: _Optional[int] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("drafter", "num_drafts", "num_accepted_drafts")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    num_drafts: int
    num_accepted_drafts: int
    def __init__(self, drafter: _Optional[str] = ..., num_drafts: _Optional[int] = ..., num_accepted_drafts: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("owner", "limit")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    owner: str
    limit: int
    def __init__(self, owner: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceStatus]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceStatus, _Mapping]]] = ...) -> None: ...

class SequenceStatus(_message.Message):
    __slots__ = ("seq_id", "request_id", "state", "epoch", "owner", "prompt_tokens", "num_tokens", "age_ms", "priority", "crashes", "tenant", "moving_to")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CRASHES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MOVING_TO_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    request_id: str
    state: _inference_pb2.RequestState
    epoch: int
    owner: str
    prompt_tokens: int
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    age_ms: int
    priority: _inference_pb2.Priority
    crashes: int
    tenant: str
    moving_to: str
    def __init__(self, seq_id: _Optional[str] = ..., request_id: _Optional[str] = ..., state: _Optional[_Union[_inference_pb2.RequestState, str]] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[_Iterable[int]] = ..., age_ms: _Optional[int] = ..., priority: _Optional[_Union[_inference_pb2.Priority, str]] = ..., crashes: _Optional[int] = ..., tenant: _Optional[str] = ..., moving_to: _Optional[str] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("request_id", "worker_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    worker_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class MigrateResponse(_message.Message):
    __slots__ = ("epoch", "worker_id", "num_blocks", "num_sent_blocks", "num_sent_bytes", "total_ms", "stopped_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_id: str
    num_blocks: int
    num_sent_blocks: int
    num_sent_bytes: int
    total_ms: float
    stopped_ms: float
    def __init__(self, epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_sent_blocks: _Optional[int] = ..., num_sent_bytes: _Optional[int] = ..., total_ms: _Optional[float] = ..., stopped_ms: _Optional[float] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "grace_ms", "undo")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_ms: int
    undo: bool
    def __init__(self, worker_id: _Optional[str] = ..., grace_ms: _Optional[int] = ..., undo: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("num_left", "num_released", "num_migrated")
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATED_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    num_released: int
    num_migrated: int
    def __init__(self, num_left: _Optional[int] = ..., num_released: _Optional[int] = ..., num_migrated: _Optional[int] = ...) -> None: ...

class ExplainPlacementRequest(_message.Message):
    __slots__ = ("request_id", "hypothetical", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HYPOTHETICAL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    hypothetical: _inference_pb2.GenerateRequest
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., hypothetical: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainPlacementResponse(_message.Message):
    __slots__ = ("worker_id", "candidates")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, worker_id: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker_id", "eligible", "reason", "device_hit_tokens", "host_hit_tokens", "prefill_cost", "load_cost", "pressure_cost", "total_cost", "recent_picks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COST_FIELD_NUMBER: _ClassVar[int]
    LOAD_COST_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_COST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COST_FIELD_NUMBER: _ClassVar[int]
    RECENT_PICKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    eligible: bool
    reason: str
    device_hit_tokens: int
    host_hit_tokens: int
    prefill_cost: float
    load_cost: float
    pressure_cost: float
    total_cost: float
    recent_picks: int
    def __init__(self, worker_id: _Optional[str] = ..., eligible: bool = ..., reason: _Optional[str] = ..., device_hit_tokens: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., prefill_cost: _Optional[float] = ..., load_cost: _Optional[float] = ..., pressure_cost: _Optional[float] = ..., total_cost: _Optional[float] = ..., recent_picks: _Optional[int] = ...) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class WatchClusterResponse(_message.Message):
    __slots__ = ("workers", "failure", "router_id", "router_name", "up_ms", "queue", "sequences", "has_more_sequences", "moves", "traffic", "num_streams")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_NAME_FIELD_NUMBER: _ClassVar[int]
    UP_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    failure: _types_pb2.Failure
    router_id: str
    router_name: str
    up_ms: int
    queue: QueueStatus
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceStatus]
    has_more_sequences: bool
    moves: _containers.RepeatedCompositeFieldContainer[SequenceMove]
    traffic: _containers.RepeatedCompositeFieldContainer[ModelTraffic]
    num_streams: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ..., router_id: _Optional[str] = ..., router_name: _Optional[str] = ..., up_ms: _Optional[int] = ..., queue: _Optional[_Union[QueueStatus, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceStatus, _Mapping]]] = ..., has_more_sequences: bool = ..., moves: _Optional[_Iterable[_Union[SequenceMove, _Mapping]]] = ..., traffic: _Optional[_Iterable[_Union[ModelTraffic, _Mapping]]] = ..., num_streams: _Optional[int] = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("num_queued", "queued_tokens", "tenants", "num_tenants")
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TENANTS_FIELD_NUMBER: _ClassVar[int]
    num_queued: int
    queued_tokens: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantQueue]
    num_tenants: int
    def __init__(self, num_queued: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantQueue, _Mapping]]] = ..., num_tenants: _Optional[int] = ...) -> None: ...

class TenantQueue(_message.Message):
    __slots__ = ("tenant", "num_queued", "queued_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_queued: int
    queued_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., num_queued: _Optional[int] = ..., queued_tokens: _Optional[int] = ...) -> None: ...

class SequenceMove(_message.Message):
    __slots__ = ("seq_id", "request_id", "kind", "from_worker", "to_worker", "age_ms", "tenant", "number", "seen")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FROM_WORKER_FIELD_NUMBER: _ClassVar[int]
    TO_WORKER_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    request_id: str
    kind: MoveKind
    from_worker: str
    to_worker: str
    age_ms: int
    tenant: str
    number: int
    seen: str
    def __init__(self, seq_id: _Optional[str] = ..., request_id: _Optional[str] = ..., kind: _Optional[_Union[MoveKind, str]] = ..., from_worker: _Optional[str] = ..., to_worker: _Optional[str] = ..., age_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., number: _Optional[int] = ..., seen: _Optional[str] = ...) -> None: ...

class ModelTraffic(_message.Message):
    __slots__ = ("model", "num_accepted", "num_ended", "num_output_tokens", "num_prompt_tokens", "num_cached_tokens", "queued", "first_token", "between_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_accepted: int
    num_ended: int
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    queued: TimeHistogram
    first_token: TimeHistogram
    between_tokens: TimeHistogram
    def __init__(self, model: _Optional[str] = ..., num_accepted: _Optional[int] = ..., num_ended: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queued: _Optional[_Union[TimeHistogram, _Mapping]] = ..., first_token: _Optional[_Union[TimeHistogram, _Mapping]] = ..., between_tokens: _Optional[_Union[TimeHistogram, _Mapping]] = ...) -> None: ...

class TimeHistogram(_message.Message):
    __slots__ = ("bounds_s", "counts", "total_s")
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total_s: float
    def __init__(self, bounds_s: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., total_s: _Optional[float] = ...) -> None: ...

class AddPrefixRequest(_message.Message):
    __slots__ = ("name", "model", "tenant", "system", "text", "workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    tenant: str
    system: str
    text: str
    workers: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., system: _Optional[str] = ..., text: _Optional[str] = ..., workers: _Optional[int] = ...) -> None: ...

class AddPrefixResponse(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: NamedPrefix
    def __init__(self, prefix: _Optional[_Union[NamedPrefix, _Mapping]] = ...) -> None: ...

class RemovePrefixRequest(_message.Message):
    __slots__ = ("name", "model", "tenant")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    tenant: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class RemovePrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[NamedPrefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[NamedPrefix, _Mapping]]] = ...) -> None: ...

class NamedPrefix(_message.Message):
    __slots__ = ("name", "model", "tenant", "is_system", "num_tokens", "workers", "warm_on", "full_on", "num_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IS_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WARM_ON_FIELD_NUMBER: _ClassVar[int]
    FULL_ON_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    tenant: str
    is_system: bool
    num_tokens: int
    workers: int
    warm_on: _containers.RepeatedScalarFieldContainer[str]
    full_on: _containers.RepeatedScalarFieldContainer[str]
    num_requests: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., is_system: bool = ..., num_tokens: _Optional[int] = ..., workers: _Optional[int] = ..., warm_on: _Optional[_Iterable[str]] = ..., full_on: _Optional[_Iterable[str]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class AddAdapterRequest(_message.Message):
    __slots__ = ("name", "source", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    model: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class AddAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "model", "digest", "source", "rank", "num_bytes", "loaded_on", "num_workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_ON_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    digest: str
    source: str
    rank: int
    num_bytes: int
    loaded_on: _containers.RepeatedScalarFieldContainer[str]
    num_workers: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., digest: _Optional[str] = ..., source: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., loaded_on: _Optional[_Iterable[str]] = ..., num_workers: _Optional[int] = ...) -> None: ...
