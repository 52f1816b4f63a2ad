from octavo.v1 import admin_pb2 as _admin_pb2
from octavo.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_KIND_UNSPECIFIED: _ClassVar[PoolKind]
    POOL_KIND_LAST: _ClassVar[PoolKind]
    POOL_KIND_MEAN: _ClassVar[PoolKind]
    POOL_KIND_LOGITS: _ClassVar[PoolKind]

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class AdmissionOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMISSION_OUTCOME_UNSPECIFIED: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_ADMITTED: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_LATER: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_NEVER: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_REJECTED: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_STALE_EPOCH: _ClassVar[AdmissionOutcome]

class SwapOperation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SWAP_OPERATION_UNSPECIFIED: _ClassVar[SwapOperation]
    SWAP_OPERATION_OUT: _ClassVar[SwapOperation]
    SWAP_OPERATION_IN: _ClassVar[SwapOperation]
    SWAP_OPERATION_DROP: _ClassVar[SwapOperation]

class MigrationOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MIGRATION_OUTCOME_UNSPECIFIED: _ClassVar[MigrationOutcome]
    MIGRATION_OUTCOME_MOVED: _ClassVar[MigrationOutcome]
    MIGRATION_OUTCOME_STAYED: _ClassVar[MigrationOutcome]
    MIGRATION_OUTCOME_ENDED: _ClassVar[MigrationOutcome]
POOL_KIND_UNSPECIFIED: PoolKind
POOL_KIND_LAST: PoolKind
POOL_KIND_MEAN: PoolKind
POOL_KIND_LOGITS: PoolKind
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
ADMISSION_OUTCOME_UNSPECIFIED: AdmissionOutcome
ADMISSION_OUTCOME_ADMITTED: AdmissionOutcome
ADMISSION_OUTCOME_LATER: AdmissionOutcome
ADMISSION_OUTCOME_NEVER: AdmissionOutcome
ADMISSION_OUTCOME_REJECTED: AdmissionOutcome
ADMISSION_OUTCOME_STALE_EPOCH: AdmissionOutcome
SWAP_OPERATION_UNSPECIFIED: SwapOperation
SWAP_OPERATION_OUT: SwapOperation
SWAP_OPERATION_IN: SwapOperation
SWAP_OPERATION_DROP: SwapOperation
MIGRATION_OUTCOME_UNSPECIFIED: MigrationOutcome
MIGRATION_OUTCOME_MOVED: MigrationOutcome
MIGRATION_OUTCOME_STAYED: MigrationOutcome
MIGRATION_OUTCOME_ENDED: MigrationOutcome

class HelloRequest(_message.Message):
    __slots__ = ("router_id", "internal_revision")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_REVISION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    internal_revision: int
    def __init__(self, router_id: _Optional[str] = ..., internal_revision: _Optional[int] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "internal_revision", "model", "model_fingerprint", "block_size", "kv_dtype", "kv_layout", "num_blocks", "num_host_blocks", "context_tokens", "vocab_size", "tokenizer", "eos_token_ids", "max_batch_tokens", "max_batch_sequences", "device", "sampling_defaults", "max_sequence_blocks", "role", "numerics", "pooling", "lora_support", "picture_support", "ranks", "encoder_support")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    LORA_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    PICTURE_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    internal_revision: int
    model: str
    model_fingerprint: str
    block_size: int
    kv_dtype: str
    kv_layout: str
    num_blocks: int
    num_host_blocks: int
    context_tokens: int
    vocab_size: int
    tokenizer: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_batch_tokens: int
    max_batch_sequences: int
    device: str
    sampling_defaults: _types_pb2.SamplingParams
    max_sequence_blocks: int
    role: WorkerRole
    numerics: str
    pooling: ModelPooling
    lora_support: LoraSupport
    picture_support: PictureSupport
    ranks: _containers.RepeatedCompositeFieldContainer[_admin_pb2.WorkerRank]
    encoder_support: EncoderSupport
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., internal_revision: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_batch_tokens: _Optional[int] = ..., max_batch_sequences: _Optional[int] = ..., device: _Optional[str] = ..., sampling_defaults: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_sequence_blocks: _Optional[int] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., numerics: _Optional[str] = ..., pooling: _Optional[_Union[ModelPooling, _Mapping]] = ..., lora_support: _Optional[_Union[LoraSupport, _Mapping]] = ..., picture_support: _Optional[_Union[PictureSupport, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[_admin_pb2.WorkerRank, _Mapping]]] = ..., encoder_support: _Optional[_Union[EncoderSupport, _Mapping]] = ...) -> None: ...

class EncoderSupport(_message.Message):
    __slots__ = ("start", "max_encoded", "max_output", "speech")
    START_FIELD_NUMBER: _ClassVar[int]
    MAX_ENCODED_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SPEECH_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    max_encoded: int
    max_output: int
    speech: SpeechSupport
    def __init__(self, start: _Optional[_Iterable[int]] = ..., max_encoded: _Optional[int] = ..., max_output: _Optional[int] = ..., speech: _Optional[_Union[SpeechSupport, _Mapping]] = ...) -> None: ...

class SpeechSupport(_message.Message):
    __slots__ = ("placeholder", "start", "no_timestamps", "previous", "max_previous", "languages", "tasks")
    class LanguagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TasksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NO_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    LANGUAGES_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    placeholder: int
    start: int
    no_timestamps: int
    previous: int
    max_previous: int
    languages: _containers.ScalarMap[str, int]
    tasks: _containers.ScalarMap[str, int]
    def __init__(self, placeholder: _Optional[int] = ..., start: _Optional[int] = ..., no_timestamps: _Optional[int] = ..., previous: _Optional[int] = ..., max_previous: _Optional[int] = ..., languages: _Optional[_Mapping[str, int]] = ..., tasks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PictureSupport(_message.Message):
    __slots__ = ("refusal", "token_id", "cell", "min_pixels", "max_pixels", "num_positions")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    token_id: int
    cell: int
    min_pixels: int
    max_pixels: int
    num_positions: int
    def __init__(self, refusal: _Optional[str] = ..., token_id: _Optional[int] = ..., cell: _Optional[int] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., num_positions: _Optional[int] = ...) -> None: ...

class LoraSupport(_message.Message):
    __slots__ = ("refusal", "num_layers", "modules", "expert_layers", "max_bytes")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    num_layers: int
    modules: _containers.RepeatedCompositeFieldContainer[LoraModule]
    expert_layers: _containers.RepeatedScalarFieldContainer[int]
    max_bytes: int
    def __init__(self, refusal: _Optional[str] = ..., num_layers: _Optional[int] = ..., modules: _Optional[_Iterable[_Union[LoraModule, _Mapping]]] = ..., expert_layers: _Optional[_Iterable[int]] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class LoraModule(_message.Message):
    __slots__ = ("name", "outputs", "inputs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    outputs: int
    inputs: int
    def __init__(self, name: _Optional[str] = ..., outputs: _Optional[int] = ..., inputs: _Optional[int] = ...) -> None: ...

class ModelPooling(_message.Message):
    __slots__ = ("hidden_size", "kind", "normalize", "judge", "refusal")
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    JUDGE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    hidden_size: int
    kind: PoolKind
    normalize: bool
    judge: str
    refusal: str
    def __init__(self, hidden_size: _Optional[int] = ..., kind: _Optional[_Union[PoolKind, str]] = ..., normalize: bool = ..., judge: _Optional[str] = ..., refusal: _Optional[str] = ...) -> None: ...

class PoolRequest(_message.Message):
    __slots__ = ("prompts", "kind", "normalize", "dimensions", "logit_token_ids", "salt", "priority", "deadline_in_ms")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_IN_MS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenIds]
    kind: PoolKind
    normalize: bool
    dimensions: int
    logit_token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    priority: int
    deadline_in_ms: int
    def __init__(self, prompts: _Optional[_Iterable[_Union[_types_pb2.TokenIds, _Mapping]]] = ..., kind: _Optional[_Union[PoolKind, str]] = ..., normalize: bool = ..., dimensions: _Optional[int] = ..., logit_token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ..., priority: _Optional[int] = ..., deadline_in_ms: _Optional[int] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("router_id", "hashes")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, router_id: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KeepResponse(_message.Message):
    __slots__ = ("missing", "num_kept")
    MISSING_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    num_kept: int
    def __init__(self, missing: _Optional[_Iterable[int]] = ..., num_kept: _Optional[int] = ...) -> None: ...

class PoolResponse(_message.Message):
    __slots__ = ("vectors",)
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    vectors: _containers.RepeatedCompositeFieldContainer[PooledVector]
    def __init__(self, vectors: _Optional[_Iterable[_Union[PooledVector, _Mapping]]] = ...) -> None: ...

class PooledVector(_message.Message):
    __slots__ = ("index", "values", "cached_tokens", "failure")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    index: int
    values: bytes
    cached_tokens: int
    failure: _types_pb2.Failure
    def __init__(self, index: _Optional[int] = ..., values: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("seq_id", "epoch", "prompt", "outputs", "finished_branches", "sampling", "salt", "priority", "deadline_in_ms", "alone", "prefix_owner", "prefix_owner_tokens", "lora", "lora_source", "pictures")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_IN_MS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_OWNER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_OWNER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    LORA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    prompt: _types_pb2.TokenIds
    outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenIds]
    finished_branches: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    salt: str
    priority: int
    deadline_in_ms: int
    alone: bool
    prefix_owner: str
    prefix_owner_tokens: int
    lora: str
    lora_source: str
    pictures: str
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[_types_pb2.TokenIds, _Mapping]]] = ..., finished_branches: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., salt: _Optional[str] = ..., priority: _Optional[int] = ..., deadline_in_ms: _Optional[int] = ..., alone: bool = ..., prefix_owner: _Optional[str] = ..., prefix_owner_tokens: _Optional[int] = ..., lora: _Optional[str] = ..., lora_source: _Optional[str] = ..., pictures: _Optional[str] = ...) -> None: ...

class ScheduleRequest(_message.Message):
    __slots__ = ("router_id", "admissions")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    def __init__(self, router_id: _Optional[str] = ..., admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ...) -> None: ...

class AdmissionResult(_message.Message):
    __slots__ = ("seq_id", "outcome", "failure")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    outcome: AdmissionOutcome
    failure: _types_pb2.Failure
    def __init__(self, seq_id: _Optional[str] = ..., outcome: _Optional[_Union[AdmissionOutcome, str]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ...) -> None: ...

class ScheduleResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AdmissionResult]
    def __init__(self, results: _Optional[_Iterable[_Union[AdmissionResult, _Mapping]]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("open", "grant", "pause", "follow", "unfollow")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    UNFOLLOW_FIELD_NUMBER: _ClassVar[int]
    open: Open
    grant: Grant
    pause: Pause
    follow: Follow
    unfollow: Unfollow
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., unfollow: _Optional[_Union[Unfollow, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Follow(_message.Message):
    __slots__ = ("seq_id", "next_indexes")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEXES_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    next_indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq_id: _Optional[str] = ..., next_indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class Unfollow(_message.Message):
    __slots__ = ("seq_id",)
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    def __init__(self, seq_id: _Optional[str] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "incarnation", "items", "unknown_seq_ids", "num_branches", "num_tokens", "moved")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    incarnation: str
    items: _containers.RepeatedCompositeFieldContainer[StepItem]
    unknown_seq_ids: _containers.RepeatedScalarFieldContainer[str]
    num_branches: int
    num_tokens: int
    moved: _containers.RepeatedCompositeFieldContainer[MovedSequence]
    def __init__(self, step_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., items: _Optional[_Iterable[_Union[StepItem, _Mapping]]] = ..., unknown_seq_ids: _Optional[_Iterable[str]] = ..., num_branches: _Optional[int] = ..., num_tokens: _Optional[int] = ..., moved: _Optional[_Iterable[_Union[MovedSequence, _Mapping]]] = ...) -> None: ...

class MovedSequence(_message.Message):
    __slots__ = ("seq_id", "epoch", "owner")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    owner: str
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class StepItem(_message.Message):
    __slots__ = ("seq_id", "epoch", "branch", "first_index", "token_ids", "chain", "logprobs", "finish_reason", "failure", "cumulative_logprob", "prompt_logprobs", "cached_tokens", "prefill_ms", "num_drafts", "num_accepted_drafts")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    branch: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    chain: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.Logprobs]
    finish_reason: _types_pb2.FinishReason
    failure: _types_pb2.Failure
    cumulative_logprob: float
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.Logprobs]
    cached_tokens: int
    prefill_ms: int
    num_drafts: int
    num_accepted_drafts: int
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., branch: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., chain: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.Logprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ..., cumulative_logprob: _Optional[float] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.Logprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., prefill_ms: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_accepted_drafts: _Optional[int] = ...) -> None: ...

class SwapItem(_message.Message):
    __slots__ = ("seq_id", "epoch", "operation")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    operation: SwapOperation
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., operation: _Optional[_Union[SwapOperation, str]] = ...) -> None: ...

class SwapRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SwapItem]
    def __init__(self, items: _Optional[_Iterable[_Union[SwapItem, _Mapping]]] = ...) -> None: ...

class SwapResult(_message.Message):
    __slots__ = ("seq_id", "num_blocks", "failure", "num_bytes", "copy_ms")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_MS_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    num_blocks: int
    failure: _types_pb2.Failure
    num_bytes: int
    copy_ms: float
    def __init__(self, seq_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ..., num_bytes: _Optional[int] = ..., copy_ms: _Optional[float] = ...) -> None: ...

class SwapResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SwapResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SwapResult, _Mapping]]] = ...) -> None: ...

class WorkerMigrateRequest(_message.Message):
    __slots__ = ("seq_id", "epoch", "target", "during_prefill")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DURING_PREFILL_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    target: str
    during_prefill: bool
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., target: _Optional[str] = ..., during_prefill: bool = ...) -> None: ...

class WorkerMigrateResponse(_message.Message):
    __slots__ = ("outcome", "failure", "epoch", "target", "rounds", "num_blocks", "num_sent_blocks", "num_sent_bytes", "total_ms", "stopped_ms")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_MS_FIELD_NUMBER: _ClassVar[int]
    outcome: MigrationOutcome
    failure: _types_pb2.Failure
    epoch: int
    target: str
    rounds: int
    num_blocks: int
    num_sent_blocks: int
    num_sent_bytes: int
    total_ms: float
    stopped_ms: float
    def __init__(self, outcome: _Optional[_Union[MigrationOutcome, str]] = ..., failure: _Optional[_Union[_types_pb2.Failure, _Mapping]] = ..., epoch: _Optional[int] = ..., target: _Optional[str] = ..., rounds: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_sent_blocks: _Optional[int] = ..., num_sent_bytes: _Optional[int] = ..., total_ms: _Optional[float] = ..., stopped_ms: _Optional[float] = ...) -> None: ...

class WorkerCancelRequest(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceEpoch]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceEpoch, _Mapping]]] = ...) -> None: ...

class SequenceEpoch(_message.Message):
    __slots__ = ("seq_id", "epoch")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class WorkerCancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("incarnation", "event_seq", "load", "snapshot", "events", "digest", "adapters", "file_events")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    FILE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    event_seq: int
    load: _admin_pb2.WorkerLoad
    snapshot: KvSnapshot
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    digest: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    file_events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, incarnation: _Optional[str] = ..., event_seq: _Optional[int] = ..., load: _Optional[_Union[_admin_pb2.WorkerLoad, _Mapping]] = ..., snapshot: _Optional[_Union[KvSnapshot, _Mapping]] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., digest: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., file_events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvSnapshot(_message.Message):
    __slots__ = ("device_hashes", "host_hashes")
    DEVICE_HASHES_FIELD_NUMBER: _ClassVar[int]
    HOST_HASHES_FIELD_NUMBER: _ClassVar[int]
    device_hashes: bytes
    host_hashes: bytes
    def __init__(self, device_hashes: _Optional[bytes] = ..., host_hashes: _Optional[bytes] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    removed: bytes
    cleared: bool
    def __init__(self, stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., cleared: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_ms", "undo")
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    undo: bool
    def __init__(self, grace_ms: _Optional[int] = ..., undo: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_left", "num_migrated", "num_released")
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATED_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    num_migrated: int
    num_released: int
    def __init__(self, num_left: _Optional[int] = ..., num_migrated: _Optional[int] = ..., num_released: _Optional[int] = ...) -> None: ...
