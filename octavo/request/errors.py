"""The one tree of errors. Each class names its status code, its reason, and whether trying again can help.

`octavo.wire.statuses` turns an error into a status with google.rpc.ErrorInfo, and such a status into an error of the
same class.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

T = TypeVar("T")


class Code(IntEnum):
    """The values of google.rpc.Code, here so that this module needs no gRPC."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class ServingError(Exception):
    """The root of the tree, and the class of an error that no other class names.

    `message` says what is wrong, where, and what to do next.
    """

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, code: Code, retryable: bool = False) -> None:
        """The reason is the class's name in capitals: QueueFull has QUEUE_FULL."""
        cls.code, cls.retryable = code, retryable
        cls.reason = re.sub(r"\B[A-Z]", r"_\g<0>", cls.__name__).upper()
        CLASSES[cls.reason] = cls

    def __init__(self, message: str, *, retry_after_ms: int = 0, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.metadata = metadata

    @classmethod
    def restore(
        cls, message: str, retry_after_ms: int = 0, metadata: Mapping[str, str] | None = None
    ) -> "ServingError":
        """Makes an error of this class from the parts that were sent or stored, without calling its constructor."""
        error = cls.__new__(cls)
        ServingError.__init__(error, message, retry_after_ms=retry_after_ms)
        error.metadata = dict(metadata or {})
        return error

    def failure(self) -> "Failure":
        return Failure(int(self.code), self.reason, self.message, self.retryable)


CLASSES: dict[str, type[ServingError]] = {ServingError.reason: ServingError}  # the whole tree, by reason


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as data: in records, and in streams of requests that had been accepted before the error happened."""

    code: int
    reason: str
    message: str
    retryable: bool

    def error(self) -> ServingError:
        """The error that this failure was made from; a ServingError if no class here has its reason."""
        return class_of(self.reason).restore(self.message)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        return cls(**json.loads(text))


class FieldViolation(NamedTuple):
    """One field of a request that is wrong."""

    field: str  # its path from the request: chat.messages[2].content
    description: str  # what is wrong, and what would be right


class InvalidArgument(ServingError, ValueError, code=Code.INVALID_ARGUMENT):
    """The request is wrong; `violations` say where, `field` names the first. Python callers may catch ValueError."""

    violations: tuple[FieldViolation, ...] = ()  # none only if a status without them was restored

    def __init__(self, field: str, message: str, *others: FieldViolation) -> None:
        self.violations = (FieldViolation(field, message), *others)
        super().__init__("; ".join(f"{path}: {what}" for path, what in self.violations), field=field)

    @property
    def field(self) -> str:
        return self.metadata.get("field", "")

    def inside(self, path: str) -> "InvalidArgument":
        """This error for a message that is the field `path` of another one: `n` becomes sampling.n."""
        first, *others = (FieldViolation(f"{path}.{field}", what) for field, what in self.violations)
        return InvalidArgument(*first, *others)


class ViolationCollector:
    """Runs checks that raise InvalidArgument, and raises what all of them found as one error."""

    def __init__(self) -> None:
        self.found: list[FieldViolation] = []

    def run(self, check: Callable[..., T], *arguments: Any, inside: str = "", **options: Any) -> T | None:
        """The result of the check; None if it found something wrong. `inside` is the field of the checked message."""
        try:
            return check(*arguments, **options)
        except InvalidArgument as error:
            self.found += (error.inside(inside) if inside else error).violations
            return None

    def raise_found(self) -> None:
        if self.found:
            first, *others = self.found
            raise InvalidArgument(*first, *others)


class NotFound(ServingError, code=Code.NOT_FOUND):
    """There is no such model, request or worker, or it belongs to another tenant; `resource` says which kind."""

    def __init__(self, message: str, *, resource: str = "", name: str = "") -> None:
        super().__init__(message)
        if resource:
            self.metadata = {"resource": resource, "name": name}

    @property
    def resource(self) -> str:
        """The kind of thing that was not found: "model", "adapter", "request", "sequence", "worker" or "service"."""
        return self.metadata.get("resource", "")


class Unauthenticated(ServingError, code=Code.UNAUTHENTICATED):
    """The call has no credentials, or none that are valid now. Send an API key of a tenant."""


class PermissionDenied(ServingError, code=Code.PERMISSION_DENIED):
    """The role in the caller's certificate does not allow this, or there is no certificate."""


class RequestExists(ServingError, code=Code.ALREADY_EXISTS):
    """The request id was used with a different body."""


class QueueFull(ServingError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """The queue is full. Retry after the delay."""


class QuotaExceeded(ServingError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """The tenant has as many requests under way, or has used as many tokens, as it may. Retry after the delay."""

    def __init__(self, message: str, *, quota: str, retry_after_ms: int) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, quota=quota)

    @property
    def quota(self) -> str:
        """Which one: "streams" or "tokens_per_minute"."""
        return self.metadata.get("quota", "")


class OutOfBlocks(ServingError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """The worker cannot hold the sequence now; placing it elsewhere is safe."""


class NoAdapterRoom(OutOfBlocks, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """Adapters in use leave no room on the worker for another one now. It runs other sequences all the same."""


class StoreFull(ServingError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """The store has no memory left for new requests; those that were accepted go on. Retry after the delay."""


class TooManyStreams(ServingError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """This process has as many open streams as it accepts. Retry on another router."""


class TooManyPrefixes(ServingError, code=Code.RESOURCE_EXHAUSTED):
    """The store has as many named prefixes as it may. Remove one."""


class TooManyAdapters(ServingError, code=Code.RESOURCE_EXHAUSTED):
    """The store has as many named adapters as it may. Remove one."""


class MessageTooLarge(ServingError, code=Code.RESOURCE_EXHAUSTED):
    """One message is larger than the limit of the connection. Send a smaller one: the same message cannot succeed."""


class TooLarge(ServingError, code=Code.FAILED_PRECONDITION):
    """No worker can ever hold the sequence. Ask for fewer tokens."""


class NoWorkers(ServingError, code=Code.UNAVAILABLE, retryable=True):
    """No worker serves the model now."""


class StoreUnavailable(ServingError, code=Code.UNAVAILABLE, retryable=True):
    """The store does not answer. Retry: `octavo up` restarts a store that has died within a second."""

    def __init__(self, message: str, *, retry_after_ms: int = 500, **metadata: str) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, **metadata)


class Draining(ServingError, code=Code.UNAVAILABLE, retryable=True):
    """This process is about to end. Retry on another one."""


class Loading(ServingError, code=Code.UNAVAILABLE, retryable=True):
    """This process has only just started and cannot serve yet."""


class Unreachable(ServingError, code=Code.UNAVAILABLE, retryable=True):
    """The other process cannot be reached, or the connection to it was lost: it may have died."""


class StaleEpoch(ServingError, code=Code.ABORTED):
    """The sequence has a newer owner. Re-read the record; do not retry here."""


class TransferFailed(ServingError, code=Code.ABORTED):
    """Blocks did not reach the worker that was to have them; `cause` names why. The sequence stays with its owner."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message, cause=cause)

    @property
    def cause(self) -> str:
        """A name of gpu_worker.migration.blocks.frames.Refusal."""
        return self.metadata.get("cause", "")


class CannotMove(ServingError, code=Code.FAILED_PRECONDITION):
    """The sequence cannot move with its blocks now; `cause` says why. It goes on where it is, or is replayed."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message, cause=cause)

    @property
    def cause(self) -> str:
        """One word, such as "beams" or "prefill"."""
        return self.metadata.get("cause", "")


class TooManyMoves(ServingError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """The worker moves as many sequences to other workers as it may at once. Retry soon."""


class Mismatch(ServingError, code=Code.FAILED_PRECONDITION):
    """The model, the layout or the schema revision of two processes differ."""


class DeadlineExceeded(ServingError, code=Code.DEADLINE_EXCEEDED):
    """The deadline passed before the request was accepted."""


class Cancelled(ServingError, code=Code.CANCELLED):
    """The request was cancelled."""


class HistoryLost(ServingError, code=Code.DATA_LOSS):
    """The history of a stream cannot be trusted. Start again with a new request id."""


class ForeignToken(ServingError, code=Code.FAILED_PRECONDITION):
    """The resume token was made with another key than the store has now. Attach by request id and next indexes."""


class PoisonSuspected(ServingError, code=Code.INTERNAL):
    """Several workers died while running this request; it will not be tried again."""


class BadLogits(ServingError, code=Code.INTERNAL):
    """The model produced no finite logit for this sequence."""


class ConstraintUnmet(ServingError, code=Code.FAILED_PRECONDITION):
    """The constraint and other sampling parameters left no token, or it became too complex. Loosen or simplify it."""


class ConstraintDiverged(ServingError, code=Code.INTERNAL):
    """The output so far does not keep the constraint, which is a defect of octavo: report it."""


class RunnerFailed(ServingError, code=Code.INTERNAL):
    """The model raised an error in a step that ran this sequence alone."""


class BadModel(ServingError, code=Code.FAILED_PRECONDITION):
    """The model's files are incomplete, contradictory, or of a kind that is not supported; the message says which."""


class NoTokenizer(ServingError, code=Code.FAILED_PRECONDITION):
    """The model has no tokenizer, so it takes no text and gives none. Send token ids."""


class MalformedGguf(ServingError, code=Code.FAILED_PRECONDITION):
    """The file is not a GGUF file that can be trusted; the message says where it is wrong."""


class Unimplemented(ServingError, code=Code.UNIMPLEMENTED):
    """The server does not have this method or option. A later version may."""


def reasons() -> list[str]:
    """Every reason that an error can have, in the order of the alphabet."""
    return sorted(CLASSES)


def class_of(reason: str) -> type[ServingError]:
    """The class with this reason; ServingError if there is none."""
    return CLASSES.get(reason, ServingError)


def closest(word: str, known: Iterable[str]) -> str:
    """The text `; did you mean ...?` with the closest known word; empty if no word is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.8)
    return f"; did you mean {matches[0]}?" if matches else ""
