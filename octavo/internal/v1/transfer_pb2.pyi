from octavo.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareRequest(_message.Message):
    __slots__ = ("seq_id", "epoch", "number", "source", "model_fingerprint", "kv_layout", "numerics")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    number: int
    source: str
    model_fingerprint: str
    kv_layout: str
    numerics: str
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., source: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_layout: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("ticket", "secret", "ttl_ms", "port", "wanted", "num_blocks", "tail_indexes")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_INDEXES_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    secret: bytes
    ttl_ms: int
    port: int
    wanted: _containers.RepeatedCompositeFieldContainer[WantedBlock]
    num_blocks: int
    tail_indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[int] = ..., secret: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., port: _Optional[int] = ..., wanted: _Optional[_Iterable[_Union[WantedBlock, _Mapping]]] = ..., num_blocks: _Optional[int] = ..., tail_indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class WantedBlock(_message.Message):
    __slots__ = ("index", "hash")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    index: int
    hash: bytes
    def __init__(self, index: _Optional[int] = ..., hash: _Optional[bytes] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("wanted",)
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.RepeatedCompositeFieldContainer[WantedBlock]
    def __init__(self, wanted: _Optional[_Iterable[_Union[WantedBlock, _Mapping]]] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("ticket", "branches")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    branches: _containers.RepeatedCompositeFieldContainer[BranchEnd]
    def __init__(self, ticket: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[BranchEnd, _Mapping]]] = ...) -> None: ...

class BranchEnd(_message.Message):
    __slots__ = ("num_tokens", "chain", "cumulative_logprob", "logprobs", "num_computed", "prompt_logprobs")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    chain: int
    cumulative_logprob: float
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.Logprobs]
    num_computed: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.Logprobs]
    def __init__(self, num_tokens: _Optional[int] = ..., chain: _Optional[int] = ..., cumulative_logprob: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.Logprobs, _Mapping]]] = ..., num_computed: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.Logprobs, _Mapping]]] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ("epoch", "num_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GiveAdapterRequest(_message.Message):
    __slots__ = ("digest", "model_fingerprint", "name", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    model_fingerprint: str
    name: str
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class GiveAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("target", "model_fingerprint", "kv_layout", "ticket", "secret", "port", "wanted", "numerics", "standby")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    target: str
    model_fingerprint: str
    kv_layout: str
    ticket: int
    secret: bytes
    port: int
    wanted: _containers.RepeatedCompositeFieldContainer[WantedBlock]
    numerics: str
    standby: bool
    def __init__(self, target: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_layout: _Optional[str] = ..., ticket: _Optional[int] = ..., secret: _Optional[bytes] = ..., port: _Optional[int] = ..., wanted: _Optional[_Iterable[_Union[WantedBlock, _Mapping]]] = ..., numerics: _Optional[str] = ..., standby: bool = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ListHotRequest(_message.Message):
    __slots__ = ("model_fingerprint", "kv_layout", "limit", "numerics")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    kv_layout: str
    limit: int
    numerics: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., kv_layout: _Optional[str] = ..., limit: _Optional[int] = ..., numerics: _Optional[str] = ...) -> None: ...

class ListHotResponse(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class StandbyRequest(_message.Message):
    __slots__ = ("owner", "model_fingerprint", "kv_layout", "numerics", "histories", "number")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    HISTORIES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    model_fingerprint: str
    kv_layout: str
    numerics: str
    histories: _containers.RepeatedCompositeFieldContainer[NamedHistory]
    number: int
    def __init__(self, owner: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_layout: _Optional[str] = ..., numerics: _Optional[str] = ..., histories: _Optional[_Iterable[_Union[NamedHistory, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class NamedHistory(_message.Message):
    __slots__ = ("seq_id", "branch", "first", "hashes", "tail", "blocks")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    branch: int
    first: int
    hashes: bytes
    tail: SentBlock
    blocks: _containers.RepeatedCompositeFieldContainer[SentBlock]
    def __init__(self, seq_id: _Optional[str] = ..., branch: _Optional[int] = ..., first: _Optional[int] = ..., hashes: _Optional[bytes] = ..., tail: _Optional[_Union[SentBlock, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[SentBlock, _Mapping]]] = ...) -> None: ...

class SentBlock(_message.Message):
    __slots__ = ("hash", "content", "checksum")
    HASH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    content: bytes
    checksum: int
    def __init__(self, hash: _Optional[bytes] = ..., content: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class StandbyResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[HistoryState]
    def __init__(self, states: _Optional[_Iterable[_Union[HistoryState, _Mapping]]] = ...) -> None: ...

class HistoryState(_message.Message):
    __slots__ = ("num_named", "num_held", "refused")
    NUM_NAMED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    num_named: int
    num_held: int
    refused: bool
    def __init__(self, num_named: _Optional[int] = ..., num_held: _Optional[int] = ..., refused: bool = ...) -> None: ...
