from octavo.v1 import inference_pb2 as _inference_pb2
from octavo.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("worker_id", "incarnation", "endpoint", "model", "model_fingerprint", "device", "block_size", "kv_dtype", "kv_layout", "num_blocks", "num_host_blocks", "context_tokens", "max_batch_tokens", "max_batch_sequences", "internal_revision", "load", "load_age_ms", "available", "reason", "pid")
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
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., endpoint: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., device: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., context_tokens: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_batch_sequences: _Optional[int] = ..., internal_revision: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., load_age_ms: _Optional[int] = ..., available: bool = ..., reason: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_swapped", "num_free_blocks", "num_cached_blocks", "num_used_blocks", "num_prefill_tokens", "step_ms", "num_steps", "draining", "num_sequences", "prefill_tokens_per_s", "num_free_host_blocks", "num_preempted_swap", "num_preempted_recompute")
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
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., step_ms: _Optional[float] = ..., num_steps: _Optional[int] = ..., draining: bool = ..., num_sequences: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., num_free_host_blocks: _Optional[int] = ..., num_preempted_swap: _Optional[int] = ..., num_preempted_recompute: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("seq_id", "request_id", "state", "epoch", "owner", "prompt_tokens", "num_tokens", "age_ms", "priority", "crashes")
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
    def __init__(self, seq_id: _Optional[str] = ..., request_id: _Optional[str] = ..., state: _Optional[_Union[_inference_pb2.RequestState, str]] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[_Iterable[int]] = ..., age_ms: _Optional[int] = ..., priority: _Optional[_Union[_inference_pb2.Priority, str]] = ..., crashes: _Optional[int] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("request_id", "worker_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    worker_id: str
    def __init__(self, request_id: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class MigrateResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("num_left", "num_released")
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    num_released: int
    def __init__(self, num_left: _Optional[int] = ..., num_released: _Optional[int] = ...) -> None: ...

class ExplainPlacementRequest(_message.Message):
    __slots__ = ("request_id", "hypothetical")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HYPOTHETICAL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    hypothetical: _inference_pb2.GenerateRequest
    def __init__(self, request_id: _Optional[str] = ..., hypothetical: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("workers", "failure")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    failure: _types_pb2.Failure
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ...) -> None: ...
