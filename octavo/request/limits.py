"""The limits of every field a client can set: one table, checked by `validation`, printed in docs/protocol.md.

No limit here depends on a model. Callers give the limits of the model (vocabulary, context) to the validator.
"""

from collections.abc import Collection
from dataclasses import dataclass

from octavo.request.errors import InvalidArgument

MIB = 1024 * 1024
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

MAX_MESSAGE_BYTES = 4 * MIB  # on public connections
MAX_INTERNAL_MESSAGE_BYTES = 64 * MIB  # between routers and workers
MAX_METADATA_BYTES = 8 * 1024
MAX_REQUEST_ID_CHARS = 128
MAX_ROUTER_ID_CHARS = 128
MAX_BATCH_ITEMS = 1024  # of Worker.Schedule and Swap
MAX_CHAT_MESSAGES = 1024
MAX_ROLE_BYTES = 64
MAX_SALT_BYTES = 128
MAX_TEXT_BYTES_PER_CONTEXT_TOKEN = 16
MAX_DEADLINE_MS = 365 * 24 * 3600 * 1000
MAX_DRAIN_MS = 3600 * 1000
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
        high = str(int(self.high)) if self.integer else f"{self.high:g}"
        return f"{self.low:g} to {high}"


def _integers(low: int, high: int, *, optional: bool = False) -> NumberRange:
    return NumberRange(low, high, integer=True, optional=optional)


# Fields of SamplingParams that hold one number.
NUMBERS: dict[str, NumberRange] = {
    "temperature": NumberRange(0, 10),
    "top_p": NumberRange(0, 1, above=True),
    "top_k": _integers(0, U32_MAX),
    "min_p": NumberRange(0, 1),
    "n": _integers(1, MAX_N),
    "best_of": _integers(0, MAX_N),
    "max_tokens": _integers(1, U32_MAX, optional=True),
    "min_tokens": _integers(0, U32_MAX),
    "repetition_penalty": NumberRange(0, 10, above=True),
    "presence_penalty": NumberRange(-2, 2),
    "frequency_penalty": NumberRange(-2, 2),
    "seed": _integers(0, U64_MAX, optional=True),
    "logprobs": _integers(0, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": _integers(0, MAX_LOGPROBS, optional=True),
    "beam_width": _integers(0, MAX_BEAM_WIDTH),
    "length_penalty": NumberRange(0, 4),
}

# Fields of SamplingParams that are true or false.
FLAGS: tuple[str, ...] = ("include_stop", "ignore_eos", "skip_special_tokens")

# Fields of SamplingParams that hold several values, and how many they may hold.
COUNTS: dict[str, int] = {
    "stop": MAX_STOP,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "allowed_token_ids": MAX_LISTED_TOKEN_IDS,
    "banned_token_ids": MAX_LISTED_TOKEN_IDS,
    "banned_sequences": MAX_BANNED_SEQUENCES,
}

# Fields that say how single tokens are drawn. Beam search draws no tokens, so beside it they must have these values.
WITHOUT_BEAMS: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def check_count(field: str, values: Collection[object]) -> None:
    """Refuses a list that is longer than its limit. It is cheap, and so can run before the list is copied."""
    if not len(values) <= COUNTS[field]:
        raise InvalidArgument(field, f"{len(values)} entries are too many; at most {COUNTS[field]}")
