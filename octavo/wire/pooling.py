"""Converts between messages about vectors and plain values."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.internal.v1 import worker_pb2
from octavo.pooling.params import ModelPooling, PoolingParams, PoolKind
from octavo.request.errors import Failure, InvalidArgument
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import failure_from_wire, failure_to_wire

KINDS = {
    PoolKind.LAST: worker_pb2.POOL_KIND_LAST,
    PoolKind.MEAN: worker_pb2.POOL_KIND_MEAN,
    PoolKind.LOGITS: worker_pb2.POOL_KIND_LOGITS,
}
FROM_WIRE = {value: kind for kind, value in KINDS.items()}
NAMES = {inference_pb2.POOLING_UNSPECIFIED: "", inference_pb2.POOLING_LAST: "last", inference_pb2.POOLING_MEAN: "mean"}


@dataclass(frozen=True, slots=True)
class PromptVector:
    """What became of one prompt of a call to a worker: its float32 numbers, or a failure."""

    index: int
    values: bytes
    cached_tokens: int = 0
    failure: Failure | None = None

    @property
    def numbers(self) -> "array[float]":
        return floats_of(self.values)


def floats_of(data: bytes) -> "array[float]":
    """Numbers of four bytes, little endian."""
    numbers = array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def floats_to_bytes(numbers: "array[float]") -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def model_pooling_to_wire(pooling: ModelPooling) -> worker_pb2.ModelPooling:
    return worker_pb2.ModelPooling(
        hidden_size=pooling.hidden_size,
        kind=KINDS[pooling.kind],
        normalize=pooling.normalize,
        judge=pooling.judge,
        refusal=pooling.refusal,
    )


def model_pooling_from_wire(message: worker_pb2.ModelPooling) -> ModelPooling:
    kind = FROM_WIRE.get(message.kind, PoolKind.LAST)
    return ModelPooling(message.hidden_size, kind, message.normalize, message.judge, message.refusal)


def pool_request(
    prompts: Iterable[Sequence[int]], params: PoolingParams, *, salt: str, priority: int, deadline_in_ms: int
) -> worker_pb2.PoolRequest:
    return worker_pb2.PoolRequest(
        prompts=[types_pb2.TokenIds(ids=prompt) for prompt in prompts],
        kind=KINDS[params.kind],
        normalize=params.normalize,
        dimensions=params.dimensions,
        logit_token_ids=params.token_ids,
        salt=salt,
        priority=priority,
        deadline_in_ms=deadline_in_ms,
    )


def pool_params(request: worker_pb2.PoolRequest) -> PoolingParams:
    """What a call to a worker asks of each prompt. Raises InvalidArgument for a kind that is not known."""
    if request.kind not in FROM_WIRE:
        raise InvalidArgument("kind", f"{int(request.kind)} is no kind of vectors")
    ids = tuple(request.logit_token_ids)
    return PoolingParams(FROM_WIRE[request.kind], request.normalize, request.dimensions, ids)


def pooled_to_wire(pooled: PromptVector) -> worker_pb2.PooledVector:
    failure = None if pooled.failure is None else failure_to_wire(pooled.failure)
    return worker_pb2.PooledVector(
        index=pooled.index, values=pooled.values, cached_tokens=pooled.cached_tokens, failure=failure
    )


def pooled_from_wire(message: worker_pb2.PooledVector) -> PromptVector:
    failure = failure_from_wire(message.failure) if message.HasField("failure") else None
    return PromptVector(message.index, message.values, message.cached_tokens, failure)


def pooling_name(value: "inference_pb2.Pooling") -> str:
    """The pooling that a client names; empty: none. Raises InvalidArgument."""
    if value not in NAMES:
        raise InvalidArgument("pooling", f"{int(value)} is no pooling; use POOLING_LAST or POOLING_MEAN")
    return NAMES[value]
