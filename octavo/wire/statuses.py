"""Errors as statuses of gRPC: `status_of` an error that leaves a handler, and the `error_from` a call that failed.

Some calls fail before gRPC has found a handler: no interceptor sees them, and their statuses have no ErrorInfo.
`error_from` names those by their code: an oversized message (RESOURCE_EXHAUSTED) is MessageTooLarge, a lost connection
(UNAVAILABLE) is Unreachable, an unknown method is Unimplemented.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from octavo.request import errors
from octavo.request.errors import ServingError

DOMAIN = "octavo"
MAX_VIOLATIONS_BYTES = 2560  # of one status, for the reason of the next limit
MAX_DETAIL_BYTES = 1024  # of a status message; metadata values have at most 256: trailers are limited to 8 KiB


def status_of(error: ServingError) -> Status:
    """The status of an error. `error_from` makes an equal error from it."""
    status = Status(code=int(error.code), message=_clip(error.message, MAX_DETAIL_BYTES))
    metadata = {_clip(key, 64): _clip(value, 256) for key, value in error.metadata.items()}
    status.details.add().Pack(ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.retry_after_ms:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    if isinstance(error, errors.InvalidArgument) and error.violations:
        status.details.add().Pack(_bad_request(error.violations))
    if isinstance(error, errors.NotFound) and error.resource:
        resource = ResourceInfo(resource_type=error.resource, resource_name=_clip(metadata.get("name", ""), 256))
        status.details.add().Pack(resource)
    return status


def error_from(rpc_error: grpc.RpcError) -> ServingError:
    """The error behind a failed call: of the class that its ErrorInfo names, or else that fits its code."""
    call = cast(grpc.Call, rpc_error)
    status = status_in(rpc_error)
    error = _error_of(status) if status else None
    return error or _error_without_info(call.code(), call.details() or "")


def status_in(rpc_error: grpc.RpcError) -> Status | None:
    """The rich status that a failed call brought; None if there is none, or if it contradicts the call's own status."""
    try:
        return cast("Status | None", rpc_status.from_call(rpc_error))
    except (DecodeError, ValueError):
        return None


def is_of_octavo(rpc_error: grpc.RpcError) -> bool:
    """Whether a program of octavo has chosen the status. Libraries, proxies and other services send no such details."""
    status = status_in(rpc_error)
    return status is not None and _error_of(status) is not None


@contextmanager
def serving_errors() -> Iterator[None]:
    """Calls inside this context raise ServingErrors instead of grpc.RpcErrors, also at `await` and `async for`."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from(error) from error


def _bad_request(violations: Sequence[errors.FieldViolation]) -> BadRequest:
    """All violations, as far as the trailers have room for them."""
    message = BadRequest()
    for field, description in violations:
        message.field_violations.add(field=_clip(field, 128), description=_clip(description, 256))
        if message.ByteSize() > MAX_VIOLATIONS_BYTES:
            message.field_violations.pop()
            break
    return message


def _clip(text: object, max_bytes: int) -> str:
    return str(text).encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _error_of(status: Status) -> ServingError | None:
    """The error in the details; None if they cannot be read or are not of octavo: a proxy may have written them."""
    info, retry, bad_request = ErrorInfo(), RetryInfo(), BadRequest()
    try:
        for detail in status.details:
            detail.Unpack(info)
            detail.Unpack(retry)
            detail.Unpack(bad_request)
    except DecodeError:
        return None
    if info.domain != DOMAIN:
        return None
    delay_ms = retry.retry_delay.seconds * 1000 + retry.retry_delay.nanos // 1_000_000
    error = errors.class_of(info.reason).restore(status.message, delay_ms, info.metadata)
    if isinstance(error, errors.InvalidArgument):
        violations = bad_request.field_violations
        error.violations = tuple(errors.FieldViolation(found.field, found.description) for found in violations)
    return error


_CLASS_OF_CODE: dict[grpc.StatusCode, type[ServingError]] = {
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.RequestExists,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.TooManyStreams,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Mismatch,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
    grpc.StatusCode.UNAVAILABLE: errors.Unreachable,
    grpc.StatusCode.DATA_LOSS: errors.HistoryLost,
}


def _error_without_info(code: grpc.StatusCode, details: str) -> ServingError:
    cls = _CLASS_OF_CODE.get(code, ServingError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        cls = errors.MessageTooLarge
    if cls is errors.Unimplemented:
        details = f"what answers here is no router's Inference listener, or another version's: {details}"
    return cls.restore(details if cls is not ServingError else f"{code.name}: {details}")
