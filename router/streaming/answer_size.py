"""How large the answer of a Complete can become. One that fits into no message is refused before any work."""

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams

TOKEN_BYTES = 8  # an id of three bytes and its text, on average
SCORE_BYTES = 13  # a TokenLogprob: an id of three bytes, a float of four, and the tags and lengths around them
SAFE_BYTES = limits.MAX_MESSAGE_BYTES * 7 // 8  # texts may be longer than the average


def check_answer_fits(params: SamplingParams, prompt_len: int) -> None:
    """Raises InvalidArgument if an answer with all tokens that `params` (resolved) allow is too large for Complete."""
    num_tokens = params.n * (params.max_tokens or 0)
    parts = {
        "max_tokens": num_tokens * TOKEN_BYTES,
        "logprobs": num_tokens * _scores_bytes(params.logprobs),
        "prompt_logprobs": prompt_len * _scores_bytes(params.prompt_logprobs),
    }
    total = sum(parts.values())
    if total > SAFE_BYTES:
        largest = max(parts, key=lambda name: parts[name])
        raise InvalidArgument(
            f"sampling.{largest}",
            f"the answer may have {total / limits.MIB:.1f} MiB, and Complete answers with at most "
            f"{SAFE_BYTES / limits.MIB:g}; "
            "call Generate, which streams it, or ask for less",
        )


def _scores_bytes(num_alternatives: int | None) -> int:
    return 0 if num_alternatives is None else SCORE_BYTES * (1 + num_alternatives)
