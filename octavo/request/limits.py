"""The limits of what a client can set. `sampling` has the ranges of sampling parameters.

No limit here depends on a model. Callers give the limits of the model (vocabulary, context) to the validator.
"""

from dataclasses import dataclass
from typing import NamedTuple

MIB = 1024 * 1024
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

MAX_MESSAGE_BYTES = 4 * MIB  # on public connections
MAX_INTERNAL_MESSAGE_BYTES = 64 * MIB  # between routers and workers
MAX_METADATA_BYTES = 8 * 1024
MAX_MARK_TOKENS = 16  # of a mark of thinking
MAX_REQUEST_ID_CHARS = 128
MAX_ROUTER_ID_CHARS = 128
MAX_BATCH_ITEMS = 1024  # of Worker.Schedule and Swap
MAX_CHAT_MESSAGES = 1024
MAX_ROLE_BYTES = 64
MAX_SALT_BYTES = 128
MAX_ADAPTERS = 1024  # that have names, in one store
MAX_ADAPTER_SOURCE = 1024  # characters of the path of an adapter
MAX_TEXT_BYTES_PER_CONTEXT_TOKEN = 16
MAX_DEADLINE_MS = 365 * 24 * 3600 * 1000
MAX_DRAIN_MS = 3600 * 1000
RETAIN_MS = 600_000  # how long a store keeps the record of a sequence that has ended, unless it is told otherwise
MAX_RETAIN_MS = 30 * 24 * 3600 * 1000
DEFAULT_MAX_TOKENS = 256

MAX_N = 16
MAX_BEAM_WIDTH = 16
MIN_BEAM_WIDTH = 2
MAX_LOGPROBS = 20
MAX_STOP = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGIT_BIAS_VALUE = 100.0
MAX_LISTED_TOKEN_IDS = 4096
MAX_BANNED_SEQUENCES = 1024
MAX_BANNED_SEQUENCE_TOKENS = 16
MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_REGEX_BYTES = 16 * 1024
MAX_CHOICES = 1024
MAX_NESTING = 64  # of JSON in a constraint

MAX_STREAMS = 1_000_000  # of one tenant's quota
MAX_TOKENS_PER_MINUTE = 1_000_000_000


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers that a field may hold: from `low` to `high`, both included; with `above`, `low` is not included."""

    low: float
    high: float
    above: bool = False
    integer: bool = False
    optional: bool = False  # the field may be None as well

    def __contains__(self, value: float) -> bool:
        return (self.low < value <= self.high) if self.above else (self.low <= value <= self.high)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g}, at most {self.high:g}"
        return " to ".join(str(int(each)) if self.integer else f"{each:g}" for each in (self.low, self.high))


def integers(low: int, high: int, *, optional: bool = False) -> NumberRange:
    return NumberRange(low, high, integer=True, optional=optional)


class TenantQuota(NamedTuple):
    """How much a tenant may ask for at once and per minute, over all routers of a store. 0: no such limit.

    A stream that was accepted is never ended for a quota.
    """

    max_streams: int = 0  # requests that were accepted and have not ended, whether they wait or run
    tokens_per_minute: int = 0  # of prompts and outputs


NO_QUOTA = TenantQuota()
