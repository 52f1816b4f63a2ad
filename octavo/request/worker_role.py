"""Which part of a request's life a worker is for."""

from enum import StrEnum


class WorkerRole(StrEnum):
    """What a worker is for. A role is a preference: where no other worker is left, a worker does all."""

    BOTH = "both"  # prompts and outputs
    PREFILL = "prefill"  # prompts: their sequences move to others with their first tokens
    DECODE = "decode"  # outputs
