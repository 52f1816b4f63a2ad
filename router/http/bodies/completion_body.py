"""POST /v1/completions: a text or token ids, and how they are continued."""

from typing import Any

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.request.ids import new_request_id
from octavo.request.limits import NumberRange
from octavo.v1 import inference_pb2
from router.http.bodies.common_fields import SCORES, AskedAnswer, read_common, read_max_tokens
from router.http.bodies.field_reader import FieldReader, checked_ids, checked_text
from router.http.bodies.unknown_fields import refusal_of

ID_PREFIX = "cmpl-"
DEFAULT_MAX_TOKENS = 16  # as OpenAI has it
MAX_PROMPTS = 64  # of one request
MAX_PROMPT_IDS = limits.MAX_MESSAGE_BYTES  # of one byte each, at least: the validator knows the model's limit


def read_completion(body: dict[str, Any]) -> AskedAnswer:
    """What the body asks for. Raises InvalidArgument with all that is wrong and can be seen without the model."""
    fields, request = FieldReader(body), inference_pb2.GenerateRequest()
    checks, sampling = fields.checks, request.sampling
    asked = read_common(fields, request)
    if not asked.chosen_id:
        request.request_id = ID_PREFIX + new_request_id()[2:]
    first, *asked.more_prompts = checks.run(_read_prompts, fields.take_any("prompt")) or [""]
    if isinstance(first, str):
        request.text = first
    else:
        request.token_ids.ids.extend(first)
    asked.echo = fields.take_flag("echo")
    max_tokens = read_max_tokens(fields, sampling, "max_tokens", "max_completion_tokens", least=int(not asked.echo))
    if max_tokens is None:
        sampling.max_tokens = DEFAULT_MAX_TOKENS
    elif max_tokens == 0:
        sampling.max_tokens, asked.no_output = 1, True
    best_of = fields.take_number("best_of", NumberRange(1, limits.MAX_N, integer=True))
    if best_of is not None:
        sampling.best_of = best_of
    scores = fields.take_number("logprobs", SCORES)
    if scores is not None:
        asked.scores, sampling.logprobs = True, scores
        if asked.echo:
            if asked.prompt_scores and sampling.prompt_logprobs != scores:
                fields.refuse("prompt_logprobs", f"must be {scores}, as logprobs is, beside echo")
            sampling.prompt_logprobs = scores
    if asked.echo and request.sampling.HasField("best_of") and asked.stream:
        fields.refuse("echo", "is not allowed beside best_of in a stream")
    fields.take_harmless("suffix", [""], "is not supported; leave it out")
    fields.refuse_rest(refusal_of)
    checks.raise_found()
    return asked


def _read_prompts(value: Any) -> list[str | list[int]]:
    """The prompts: a string, token ids, or a list of such."""
    if isinstance(value, str) or not isinstance(value, list) or not value or not isinstance(value[0], (str, list)):
        return [_read_prompt("prompt", value)]
    if len(value) > MAX_PROMPTS:
        raise InvalidArgument("prompt", f"{len(value)} prompts are too many; send at most {MAX_PROMPTS} in one request")
    return [_read_prompt("prompt" if len(value) == 1 else f"prompt[{i}]", each) for i, each in enumerate(value)]


def _read_prompt(field: str, value: Any) -> str | list[int]:
    if isinstance(value, str):
        return checked_text(field, value)
    if isinstance(value, list):
        return checked_ids(field, value, MAX_PROMPT_IDS)
    raise InvalidArgument(field, "must be a string or a list of token ids")
