"""Checks sampling parameters, by the rules of octavo.request.validation: each wrong field is named at once.

Whatever the value, nothing is raised but InvalidArgument.
"""

import json
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from octavo.request import limits
from octavo.request.errors import InvalidArgument, ViolationCollector
from octavo.request.limits import NumberRange
from octavo.request.sampling import PARAMETERS, Constraint, Parameter, SamplingParams, Shape


def validate_sampling(params: SamplingParams, *, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
    """Checks everything about `params` that does not depend on the prompt.

    With `eos_token_ids` it also refuses parameters that allow no token at all before min_tokens is reached.
    """
    checks = ViolationCollector()
    for row in PARAMETERS.values():
        checks.run(_check_value, row, getattr(params, row.name), vocab_size)
    checks.raise_found()  # the checks below compare fields, and so need each of them to be right
    for check in (_check_best_of, _check_min_tokens, _check_end_of_constraint):
        checks.run(check, params)
    if params.beam_width:
        checks.run(_check_beam_width, params)
        for row in PARAMETERS.values():
            if not row.beside_beams and not (row.name == "temperature" and params.greedy):  # 0: nothing is drawn either
                checks.run(_check_left_out_beside_beams, row, getattr(params, row.name))
    checks.run(_check_some_token_is_left, params, vocab_size, eos_token_ids)
    checks.raise_found()


def _check_value(row: Parameter, value: Any, vocab_size: int) -> None:
    """Checks one value by its row alone."""
    if row.allowed:
        check_number(row.name, value, row.allowed)
    elif row.is_flag:
        if type(value) is not bool:
            raise InvalidArgument(row.name, "must be true or false")
    elif row.is_constraint:
        check_constraint(value)
    elif row.name == "logit_bias":
        _check_logit_bias(value, vocab_size)
    elif value != ():
        listed = require_list(row.name, value)
        row.check_count(listed)
        if row.name == "stop":
            _check_stop(listed)
        elif row.name == "banned_sequences":
            _check_sequences(listed, vocab_size)
        else:
            check_token_ids(row.name, listed, vocab_size)


def _check_sequences(sequences: Sequence[Any], vocab_size: int) -> None:
    field, most = "banned_sequences", limits.MAX_BANNED_SEQUENCE_TOKENS
    for i, sequence in enumerate(sequences):
        if not isinstance(sequence, (tuple, list)) or not 1 <= len(sequence) <= most:
            raise InvalidArgument(field, f"entry {i} must be a list of 1 to {most} token ids")
        check_token_ids(field, sequence, vocab_size)


def check_number(field: str, value: object, allowed: NumberRange) -> None:
    if value is None and allowed.optional:
        return
    if type(value) is int or (type(value) is float and not allowed.integer):
        if value in allowed:
            return
        raise InvalidArgument(field, f"{_shown(value)} is out of range; allowed is {allowed}")
    raise InvalidArgument(field, f"must be {'a whole number' if allowed.integer else 'a number'}, {allowed}")


def _check_stop(stop: Sequence[Any]) -> None:
    for i, text in enumerate(stop):
        if type(text) is not str or not text:
            raise InvalidArgument("stop", f"entry {i} must be a string that is not empty")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidArgument("stop", f"entry {i} has no UTF-8 form") from None
        if not num_bytes <= limits.MAX_STOP_BYTES:
            raise InvalidArgument("stop", f"entry {i} has {num_bytes} bytes; at most {limits.MAX_STOP_BYTES}")


def _check_logit_bias(bias: object, vocab_size: int) -> None:
    if not isinstance(bias, (dict, MappingProxyType)):
        raise InvalidArgument("logit_bias", "must map token ids to numbers")
    if not bias:
        return
    PARAMETERS["logit_bias"].check_count(bias)
    check_token_ids("logit_bias", list(bias), vocab_size)
    allowed = NumberRange(-limits.MAX_LOGIT_BIAS_VALUE, limits.MAX_LOGIT_BIAS_VALUE)
    for token_id, value in bias.items():
        if not (type(value) in (float, int) and value in allowed):
            raise InvalidArgument("logit_bias", f"the value for token {token_id} must be a number, {allowed}")


def _check_best_of(params: SamplingParams) -> None:
    if params.beam_width:
        if params.best_of not in (0, params.n):
            raise InvalidArgument("best_of", "not allowed beside beam_width, which ranks already; leave it out")
    elif params.best_of and not params.n <= params.best_of:
        raise InvalidArgument("best_of", f"{params.best_of} is less than n ({params.n}); raise it or leave it out")


def _check_min_tokens(params: SamplingParams) -> None:
    if params.max_tokens is None and not params.min_tokens <= limits.DEFAULT_MAX_TOKENS:
        raise InvalidArgument(
            "min_tokens", f"{params.min_tokens} exceeds the default max_tokens of {limits.DEFAULT_MAX_TOKENS}; set both"
        )
    if params.max_tokens is not None and not params.min_tokens <= params.max_tokens:
        raise InvalidArgument("min_tokens", f"{params.min_tokens} exceeds max_tokens of {params.max_tokens}")


def _check_end_of_constraint(params: SamplingParams) -> None:
    if params.constraint is not None and params.thinking_budget is not None:
        raise InvalidArgument("thinking_budget", "not allowed beside constraint, which says each token already")
    if params.constraint is not None and params.ignore_eos:
        raise InvalidArgument("ignore_eos", "not allowed beside constraint, whose output ends where its form does")


def _check_beam_width(params: SamplingParams) -> None:
    if not params.beam_width >= limits.MIN_BEAM_WIDTH:
        low, high = limits.MIN_BEAM_WIDTH, limits.MAX_BEAM_WIDTH
        raise InvalidArgument(
            "beam_width", f"{params.beam_width} is not a width; allowed is {low} to {high}, or 0 for none"
        )
    if not params.n <= params.beam_width:
        raise InvalidArgument("beam_width", f"{params.beam_width} is less than n ({params.n}); raise it")


def _check_left_out_beside_beams(row: Parameter, value: object) -> None:
    if value != row.default:
        raise InvalidArgument(row.name, "not allowed beside beam_width, which does not sample; leave it out")


def _check_some_token_is_left(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Refuses parameters that leave no token: a row of logits that are all minus infinity is an error in the engine."""
    refused = set(params.banned_token_ids)
    _check_not_all_refused(params, refused, vocab_size, "banned_token_ids", "leaves no token that may be generated")
    if params.banned_sequences:  # after some output the last token of each may be refused at once
        refused.update(sequence[-1] for sequence in params.banned_sequences)
        _check_not_all_refused(params, refused, vocab_size, "banned_sequences", "may leave no token to generate")
    if params.min_tokens:
        refused.update(params.stop_token_ids)
        if not params.ignore_eos:
            refused.update(eos_token_ids)
        _check_not_all_refused(params, refused, vocab_size, "min_tokens", "leaves no token that may come before it")


def _check_not_all_refused(params: SamplingParams, refused: set[int], vocab_size: int, field: str, what: str) -> None:
    if params.allowed_token_ids:
        left = not refused.issuperset(params.allowed_token_ids)
    else:
        left = len(refused) < vocab_size
    if not left:
        raise InvalidArgument(field, f"{what}; allow others")


def resolve(
    params: SamplingParams, *, prompt_len: int, context_tokens: int, seed_source: Callable[[], int]
) -> SamplingParams:
    """`params`, validated as their prompt is, with concrete values for max_tokens, best_of and seed.

    Beside a beam search the temperature is 1, whether it was 1 or 0: log probabilities are those before temperature.

    A branch that fills the context ends with LENGTH. So max_tokens and min_tokens are at most what the prompt leaves.
    """
    asked = limits.DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
    max_tokens = min(asked, context_tokens - prompt_len)
    min_tokens = min(params.min_tokens, max_tokens)
    seed = params.seed if params.seed is not None else seed_source() & limits.U64_MAX
    temperature = 1.0 if params.beam_width else params.temperature
    best_of = params.best_of or params.n
    return replace(
        params, temperature=temperature, max_tokens=max_tokens, min_tokens=min_tokens, best_of=best_of, seed=seed
    )


def check_token_ids(field: str, token_ids: Sequence[int], below: int, *, what: str = "token id") -> None:
    """Checks that all ids are in [0, below).

    Prompts are long, so the check runs in C. Only if it fails, a loop looks for the id to name.
    """
    try:
        if not token_ids or max(array("I", token_ids)) < below:
            return
    except (TypeError, OverflowError):
        pass
    for i, token_id in enumerate(token_ids):
        if not isinstance(token_id, int):
            raise InvalidArgument(field, f"a {type(token_id).__name__} at position {i} is no {what}")
        if not 0 <= token_id < below:
            raise InvalidArgument(field, f"{what} {_shown(token_id)} at position {i} is not below {below}")
    raise InvalidArgument(field, f"must be a list of numbers below {below}")


def require_list(field: str, values: object) -> Sequence[Any]:
    if not isinstance(values, (tuple, list)):
        raise InvalidArgument(field, "must be a list")
    return values


def _shown(value: object) -> str:
    """A value as it may stand in a message: short, and never a text that a client sent."""
    if type(value) is float:
        return f"{value:g}"
    if isinstance(value, int) and -(2**64) < value < 2**64:
        return str(int(value))
    return f"a {'huge ' if isinstance(value, int) else ''}{type(value).__name__}"


def check_constraint(value: object) -> None:
    """Checks form and size, which is cheap. Raises InvalidArgument."""
    if value is None:
        return
    if not isinstance(value, Constraint):
        raise InvalidArgument("constraint", "must be a Constraint")
    field = f"constraint.{value.shape}"
    try:
        num_bytes = len(value.text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(field, "has no UTF-8 form") from None
    if not num_bytes <= value.shape.max_bytes:
        raise InvalidArgument(field, f"{num_bytes} bytes are too many; at most {value.shape.max_bytes}")
    if value.shape is Shape.JSON_OBJECT:
        return
    if not value.text:
        raise InvalidArgument(field, "is empty")
    if value.shape.is_json:
        parsed = parsed_json(field, value.text)
        if value.shape is Shape.CHOICE:
            _check_choices(field, parsed)


def parsed_json(field: str, text: str) -> Any:
    """The value of JSON of bounded nesting. Raises InvalidArgument."""
    try:
        parsed = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise InvalidArgument(field, f"is nested deeper than {limits.MAX_NESTING}") from None
    except ValueError as error:
        raise InvalidArgument(field, f"is no JSON: {error}") from None
    level, depth = [parsed], 0
    while level:
        depth += 1
        if depth > limits.MAX_NESTING:
            raise InvalidArgument(field, f"is nested deeper than {limits.MAX_NESTING}")
        level = [child for each in level for child in _children(each)]
    return parsed


def _children(value: Any) -> list[Any]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in found if isinstance(child, (dict, list))]


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_choices(field: str, choices: Any) -> None:
    if not isinstance(choices, list) or not 1 <= len(choices) <= limits.MAX_CHOICES:
        raise InvalidArgument(field, f"must be a list of 1 to {limits.MAX_CHOICES} texts")
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidArgument(field, f"entry {i} must be a text that is not empty")
