from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareRequest(_message.Message):
    __slots__ = ("mig_id", "seq_id", "epoch", "kv_layout", "block_hashes", "num_blocks")
    MIG_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    mig_id: str
    seq_id: str
    epoch: int
    kv_layout: str
    block_hashes: bytes
    num_blocks: int
    def __init__(self, mig_id: _Optional[str] = ..., seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., kv_layout: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("ticket", "ttl_ms", "missing_blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    ttl_ms: int
    missing_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., missing_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("ticket", "block_index", "data", "offset_bytes", "checksum")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    block_index: int
    data: bytes
    offset_bytes: int
    checksum: int
    def __init__(self, ticket: _Optional[str] = ..., block_index: _Optional[int] = ..., data: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("ticket", "num_tokens", "chains")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    chains: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[str] = ..., num_tokens: _Optional[_Iterable[int]] = ..., chains: _Optional[_Iterable[int]] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    def __init__(self, ticket: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
