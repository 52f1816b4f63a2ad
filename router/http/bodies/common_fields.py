"""The fields that completions and chat completions have in common, as fields of octavo.v1.GenerateRequest.

Limits are left to the validator of gRPC requests. What is checked here is that a value fits into the message at all.
"""

from dataclasses import dataclass, field
from typing import Any

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.request.limits import NumberRange
from octavo.request.sampling import PARAMETERS, Parameter
from octavo.v1 import inference_pb2, types_pb2
from router.http.bodies.constraint_fields import read_constraint
from router.http.bodies.field_reader import FieldReader, checked_ids, checked_text
from router.tools.asked_tools import AskedTools
from router.tools.output_forms import Division

PRIORITIES = {
    "system": inference_pb2.PRIORITY_SYSTEM,
    "interactive": inference_pb2.PRIORITY_INTERACTIVE,
    "default": inference_pb2.PRIORITY_DEFAULT,
    "bulk": inference_pb2.PRIORITY_BULK,
}
BY_SIGN = {-1: "interactive", 0: "default", 1: "bulk"}  # of a number, as vLLM has it: less is earlier
SIDES = {"left": False, "right": True}  # where a prompt is cut
DISCONNECTS = {"cancel": inference_pb2.ON_DISCONNECT_CANCEL, "keep": inference_pb2.ON_DISCONNECT_KEEP}
SCORES = NumberRange(0, limits.MAX_LOGPROBS, integer=True)
TOP_KS = NumberRange(-1, limits.U32_MAX, integer=True)  # vLLM's -1 is 0 here: all tokens
KEPT = NumberRange(-1, 2**31 - 1, integer=True)
PRIORITY_NUMBERS = NumberRange(-(2**63), limits.U64_MAX, integer=True)
SEEDS = NumberRange(-(2**63), limits.U64_MAX, integer=True)  # OpenAI's are signed


@dataclass(slots=True)
class AskedAnswer:
    """One request of a client, and how it wants to be answered."""

    request: inference_pb2.GenerateRequest
    stream: bool = False
    include_usage: bool = False  # a stream ends with a chunk that has the usage
    usage_in_chunks: bool = False  # and each other chunk has that of its choice so far
    scores: bool = False  # log probabilities are shown
    token_ids: bool = False  # token ids of prompt and outputs are shown
    tokens_by_id: bool = False  # log probabilities name tokens by their ids
    echo: bool = False  # the prompt stands before each text; in a chat, the message that is continued
    prompt_scores: bool = False  # log probabilities of the prompt are shown
    no_output: bool = False  # the client wants the prompt's log probabilities alone; one token is generated and dropped
    more_prompts: list[str | list[int]] = field(default_factory=list)  # beside that of the request
    tools: AskedTools | None = None  # what the model may call
    shows_reasoning: bool = True
    division: Division | None = None  # what is looked for in the outputs; None: they are content and nothing else
    form_path: str = ""  # the field of the body that has the form of the outputs
    called: str = ""  # what the client calls the request in its logs
    chosen_id: bool = False  # the client has named the request, and so may come back to it
    lora: str = ""  # the digest of the adapter that computes it; empty: none


def read_common(fields: FieldReader, request: inference_pb2.GenerateRequest) -> AskedAnswer:
    """Takes the common fields. What is wrong with them is in `fields.checks`."""
    sampling = request.sampling
    if "model" in fields:
        request.model = fields.take_text("model")
    if "request_id" in fields:
        request.request_id = fields.take_text("request_id")
    for row in PARAMETERS.values():
        if row.http is not None and row.http in fields:
            _read_parameter(fields, sampling, row, row.http)
    if "thinking_token_budget" in fields:  # vLLM's name
        _read_parameter(fields, sampling, PARAMETERS["thinking_budget"], "thinking_token_budget")
    _read_beams(fields, sampling)
    _read_priority(fields, request)
    _read_choice(fields, request, "on_disconnect", DISCONNECTS)
    asked = AskedAnswer(request, stream=fields.take_flag("stream"), token_ids=fields.take_flag("return_token_ids"))
    asked.tokens_by_id = fields.take_flag("return_tokens_as_token_ids")
    asked.chosen_id = request.HasField("request_id")
    _read_prompt_fields(fields, request, asked)
    asked.form_path = read_constraint(fields, sampling)
    options = fields.take_object("stream_options")
    if options is not None:
        if not asked.stream:
            fields.refuse("stream_options", "is allowed only beside stream: true")
        asked.include_usage = options.take_flag("include_usage")
        options.take_ignored(["include_obfuscation"])
        asked.usage_in_chunks = options.take_flag("continuous_usage_stats") and asked.include_usage
        options.refuse_rest()
    return asked


def _read_prompt_fields(fields: FieldReader, request: inference_pb2.GenerateRequest, asked: AskedAnswer) -> None:
    """Takes what concerns the prompt, whatever it is made of."""
    keep = fields.take_number("truncate_prompt_tokens", KEPT)
    if keep == 0:
        fields.refuse("truncate_prompt_tokens", "must be 1 or more, or -1: as many as fit")
    elif keep is not None:
        request.truncate_prompt_tokens = keep
    _read_choice(fields, request, "truncation_side", SIDES, "keep_prompt_start")
    if "add_special_tokens" in fields:
        request.add_special_tokens = fields.take_flag("add_special_tokens")
    if "prefix" in fields and (prefix := fields.take_text("prefix")) is not None:
        request.prefix = prefix
    request.bad_words.extend(fields.checks.run(_read_words, fields.take_any("bad_words")) or [])
    scores = fields.take_number("prompt_logprobs", SCORES)
    if scores is None:
        return
    asked.prompt_scores, request.sampling.prompt_logprobs = True, scores
    if asked.stream:
        fields.refuse("prompt_logprobs", "is not allowed in a stream; leave out stream")


def _read_words(value: Any) -> list[str]:
    words = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(words, list):
        raise InvalidArgument("bad_words", "must be a list of strings")
    return [checked_text("bad_words", word) for word in words]


def _read_beams(fields: FieldReader, sampling: types_pb2.SamplingParams) -> None:
    """Takes vLLM's name of a beam search: its width is n, if no other is named."""
    if not fields.take_flag("use_beam_search") or sampling.beam_width:
        return
    if sampling.n > 1:
        sampling.beam_width = sampling.n
    else:  # the one beam follows the likeliest token
        sampling.temperature = 0


def _read_priority(fields: FieldReader, request: inference_pb2.GenerateRequest) -> None:
    """Takes the class, or a number as vLLM has it."""
    if isinstance(fields.get("priority"), (int, float)):
        number = fields.take_number("priority", PRIORITY_NUMBERS)
        if number is not None:
            request.priority = PRIORITIES[BY_SIGN[(number > 0) - (number < 0)]]
    else:
        _read_choice(fields, request, "priority", PRIORITIES)


def _read_parameter(fields: FieldReader, sampling: types_pb2.SamplingParams, row: Parameter, name: str) -> None:
    """Takes the field `name`, which is there, into that of the row."""
    if row.allowed:
        value = fields.take_number(name, {"seed": SEEDS, "top_k": TOP_KS}.get(name, row.allowed))
        if value is not None:
            value = value & limits.U64_MAX if name == "seed" else max(0, value) if name == "top_k" else value
            setattr(sampling, row.name, value)
    elif row.is_flag:
        setattr(sampling, row.name, fields.take_flag(name))
    elif row.is_ids:
        ids = fields.checks.run(checked_ids, name, fields.take_any(name), limits.MAX_LISTED_TOKEN_IDS)
        getattr(sampling, row.name).extend(ids or [])
    else:
        fields.checks.run(_add_stops if name == "stop" else _add_bias, sampling, fields.take_any(name))


def read_max_tokens(fields: FieldReader, sampling: types_pb2.SamplingParams, *names: str, least: int = 1) -> int | None:
    """Takes the most tokens of the answer, by the first of the names that the client uses."""
    allowed = NumberRange(least, limits.U32_MAX, integer=True)
    values = [fields.take_number(name, allowed) for name in names]
    found: int | None = next((value for value in values if value is not None), None)
    if found:
        sampling.max_tokens = found
    return found


def _add_stops(sampling: types_pb2.SamplingParams, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise InvalidArgument("stop", "must be a string or a list of strings")
    sampling.stop.extend(checked_text("stop", stop) for stop in stops if stop != "" or len(stops) > 1)


def _add_bias(sampling: types_pb2.SamplingParams, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidArgument("logit_bias", "must be an object that maps token ids to numbers")
    if wrong := [name[:64] for name in value if not _is_token_id(name)]:
        raise InvalidArgument("logit_bias", f"every name must be a token id, unlike {', '.join(map(ascii, wrong[:3]))}")
    for name, bias in value.items():
        if type(bias) not in (int, float) or not -(2.0**100) < bias < 2.0**100:
            raise InvalidArgument("logit_bias", f"the value of token {int(name)} must be a number")
        sampling.logit_bias[int(name)] = bias


def _is_token_id(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= limits.U32_MAX


def _read_choice(fields: FieldReader, request: Any, name: str, choices: dict[str, Any], field: str = "") -> None:
    """Takes one of the values into the request's field, which has the same name if none is given."""
    value = fields.take_any(name)
    if value is None:
        return
    if not isinstance(value, str) or value not in choices:
        fields.refuse(name, f"must be one of {', '.join(choices)}")
    else:
        setattr(request, field or name, choices[value])
