"""POST /v1/completions: a text or token ids, and how they are continued."""

from typing import Any

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.request.ids import new_request_id
from octavo.request.limits import NumberRange
from octavo.v1 import inference_pb2
from router.http.common_fields import SCORES, AskedAnswer, read_common, read_max_tokens
from router.http.field_reader import FieldReader, checked_ids, checked_text

ID_PREFIX = "cmpl-"
DEFAULT_MAX_TOKENS = 16  # as OpenAI has it
MAX_PROMPT_IDS = limits.MAX_MESSAGE_BYTES  # of one byte each, at least: the validator knows the model's limit


def read_completion(body: dict[str, Any]) -> AskedAnswer:
    """What the body asks for. Raises InvalidArgument with all that is wrong and can be seen without the model."""
    fields, request = FieldReader(body), inference_pb2.GenerateRequest()
    checks, sampling = fields.checks, request.sampling
    asked = read_common(fields, request)
    if not asked.chosen_id:
        request.request_id = ID_PREFIX + new_request_id()[2:]
    checks.run(_add_prompt, request, fields.take_any("prompt"))
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
    fields.refuse_rest()
    checks.raise_found()
    return asked


def _add_prompt(request: inference_pb2.GenerateRequest, prompt: Any) -> None:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        request.text = checked_text("prompt", prompt)
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise InvalidArgument("prompt", f"{len(prompt)} prompts in one request; send a request for each")
    elif isinstance(prompt, list):
        request.token_ids.ids.extend(checked_ids("prompt", prompt, MAX_PROMPT_IDS))
    else:
        raise InvalidArgument("prompt", "must be a string or a list of token ids")
