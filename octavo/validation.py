"""The one validator, used where requests enter a router and where admissions enter a worker.

Every function returns, or raises errors.InvalidArgument with each wrong field, what is wrong, and what would be right.
It raises nothing else, whatever the value. A value that passes cannot raise an error inside the engine. Comparisons are
written positively (`low <= value <= high`), so that NaN fails them. Messages never quote a prompt or a stop string.
"""

import re
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from octavo import limits
from octavo.errors import InvalidArgument, ViolationCollector
from octavo.ids import RequestId
from octavo.limits import NumberRange
from octavo.record import Admission
from octavo.sampling import SamplingParams

_REQUEST_ID = re.compile(rf"[ -~]{{1,{limits.MAX_REQUEST_ID_CHARS}}}")
_SEQUENCE_ID = re.compile(r"[0-9a-f]{32}")


# Sampling parameters


def validate_sampling(params: SamplingParams, *, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
    """Checks everything about `params` that does not depend on the prompt.

    With `eos_token_ids` it also refuses parameters that allow no token at all before min_tokens is reached.
    """
    checks = ViolationCollector()
    for field, allowed in limits.NUMBERS.items():
        checks.run(_check_number, field, getattr(params, field), allowed)
    for field in limits.FLAGS:
        checks.run(_check_flag, field, getattr(params, field))
    if params.stop != ():
        checks.run(_check_stop, params.stop)
    for field in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        if getattr(params, field) != ():
            checks.run(_check_listed_ids, field, getattr(params, field), vocab_size)
    if params.banned_sequences != ():
        checks.run(_check_sequences, params.banned_sequences, vocab_size)
    checks.run(_check_logit_bias, params.logit_bias, vocab_size)
    checks.raise_found()  # the checks below compare fields, and so need each of them to be right
    for check in (_check_best_of, _check_greedy_branches, _check_min_tokens):
        checks.run(check, params)
    if params.beam_width:
        checks.run(_check_beam_width, params)
        for field, default in limits.WITHOUT_BEAMS.items():
            if field == "temperature" and params.greedy:  # 0 means what a beam search does: it draws nothing
                continue
            checks.run(_check_left_out_beside_beams, field, getattr(params, field), default)
    checks.run(_check_some_token_is_left, params, vocab_size, eos_token_ids)
    checks.raise_found()


def _check_flag(field: str, value: object) -> None:
    if type(value) is not bool:
        raise InvalidArgument(field, "must be true or false")


def _check_listed_ids(field: str, values: object, vocab_size: int) -> None:
    listed = _listed(field, values)
    check_count(field, listed)
    check_token_ids(field, listed, vocab_size)


def _check_sequences(sequences: object, vocab_size: int) -> None:
    field, most = "banned_sequences", limits.MAX_BANNED_SEQUENCE_TOKENS
    listed = _listed(field, sequences)
    check_count(field, listed)
    for i, sequence in enumerate(listed):
        if not isinstance(sequence, (tuple, list)) or not 1 <= len(sequence) <= most:
            raise InvalidArgument(field, f"entry {i} must be a list of 1 to {most} token ids")
        check_token_ids(field, sequence, vocab_size)


def check_count(field: str, values: Collection[object]) -> None:
    """Refuses a list that is longer than its limit. It is cheap, and so can run before the list is copied."""
    if not len(values) <= limits.COUNTS[field]:
        raise InvalidArgument(field, f"{len(values)} entries are too many; at most {limits.COUNTS[field]}")


def _check_number(field: str, value: object, allowed: NumberRange) -> None:
    if value is None and allowed.optional:
        return
    if type(value) is int or (type(value) is float and not allowed.integer):
        if value in allowed:
            return
        raise InvalidArgument(field, f"{_shown(value)} is out of range; allowed is {allowed}")
    raise InvalidArgument(field, f"must be {'a whole number' if allowed.integer else 'a number'}, {allowed}")


def _check_stop(stop: object) -> None:
    values = _listed("stop", stop)
    check_count("stop", values)
    for i, text in enumerate(values):
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
    check_count("logit_bias", bias)
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


def _check_greedy_branches(params: SamplingParams) -> None:
    if params.greedy and not params.beam_width and max(params.n, params.best_of) > 1:
        field = "n" if params.n > 1 else "best_of"
        raise InvalidArgument(
            field,
            f"{getattr(params, field)} branches at temperature 0 would all be equal; "
            "use beam_width, or a temperature above 0",
        )


def _check_min_tokens(params: SamplingParams) -> None:
    if params.max_tokens is None and not params.min_tokens <= limits.DEFAULT_MAX_TOKENS:
        raise InvalidArgument(
            "min_tokens", f"{params.min_tokens} exceeds the default max_tokens of {limits.DEFAULT_MAX_TOKENS}; set both"
        )
    if params.max_tokens is not None and not params.min_tokens <= params.max_tokens:
        raise InvalidArgument("min_tokens", f"{params.min_tokens} exceeds max_tokens of {params.max_tokens}")


def _check_beam_width(params: SamplingParams) -> None:
    if not params.beam_width >= limits.MIN_BEAM_WIDTH:
        low, high = limits.MIN_BEAM_WIDTH, limits.MAX_BEAM_WIDTH
        raise InvalidArgument(
            "beam_width", f"{params.beam_width} is not a width; allowed is {low} to {high}, or 0 for none"
        )
    if not params.n <= params.beam_width:
        raise InvalidArgument("beam_width", f"{params.beam_width} is less than n ({params.n}); raise it")


def _check_left_out_beside_beams(field: str, value: object, default: object) -> None:
    if value != default:
        raise InvalidArgument(field, "not allowed beside beam_width, which does not sample; leave it out")


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


# Prompts


def validate_prompt(
    token_ids: Sequence[int], *, vocab_size: int, context_tokens: int, field: str = "token_ids"
) -> None:
    """Checks a prompt, and that the context has room for it and for one more token."""
    num_prompt = len(token_ids)
    if not num_prompt:
        raise InvalidArgument(field, "the prompt is empty; at least one token is needed")
    if not num_prompt < context_tokens:
        raise InvalidArgument(
            field, f"a prompt of {num_prompt} leaves no room in this model's context of {context_tokens}; shorten it"
        )
    check_token_ids(field, token_ids, vocab_size)


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


def validate_text(data: str | bytes, field: str, *, context_tokens: int, allow_empty: bool = False) -> str:
    """The text of `data`, which may be UTF-8. Data that is far too long is refused before any work is spent on it."""
    if not isinstance(data, (str, bytes)):
        raise InvalidArgument(field, "must be text, or bytes of UTF-8")
    max_bytes = limits.MAX_TEXT_BYTES_PER_CONTEXT_TOKEN * context_tokens
    num_bytes = _num_bytes(data)
    if not num_bytes <= max_bytes:
        raise InvalidArgument(field, f"{num_bytes} bytes cannot fit this model's context; at most {max_bytes}")
    if not (data or allow_empty):
        raise InvalidArgument(field, "is empty; give some text")
    try:
        text = data.decode() if isinstance(data, bytes) else data
        text.encode()  # fails for half a surrogate pair, which a caller's string may hold
        return text
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, f"is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, f"has no UTF-8 form at character {error.start}") from None


def validate_chat(messages: Sequence[tuple[str, str | bytes]], *, context_tokens: int) -> list[tuple[str, str]]:
    """The messages, as pairs of role and content, with each content decoded."""
    if not 1 <= len(messages) <= limits.MAX_CHAT_MESSAGES:
        raise InvalidArgument("chat.messages", f"{len(messages)} messages; allowed is 1 to {limits.MAX_CHAT_MESSAGES}")
    max_bytes = limits.MAX_TEXT_BYTES_PER_CONTEXT_TOKEN * context_tokens
    num_bytes = sum(_num_bytes(content) for _, content in messages)
    if not num_bytes <= max_bytes:
        raise InvalidArgument(
            "chat.messages", f"{num_bytes} bytes cannot fit this model's context; at most {max_bytes}"
        )
    checks, turns = ViolationCollector(), []
    for i, (role, content) in enumerate(messages):
        checks.run(_check_role, f"chat.messages[{i}].role", role)
        name = f"chat.messages[{i}].{'raw_content' if isinstance(content, bytes) else 'content'}"
        text = checks.run(validate_text, content, name, context_tokens=context_tokens, allow_empty=True)
        turns.append((role, text or ""))
    checks.raise_found()
    return turns


def _check_role(field: str, role: object) -> None:
    if not (type(role) is str and 1 <= len(role) <= limits.MAX_ROLE_BYTES and role.isascii() and role.isprintable()):
        raise InvalidArgument(field, f"must be 1 to {limits.MAX_ROLE_BYTES} printable ASCII characters, such as user")


def _num_bytes(text: object) -> int:
    """The size of a text in UTF-8; 0 for what is no text, which `validate_text` refuses."""
    data = text.encode(errors="replace") if isinstance(text, str) else text
    return len(data) if isinstance(data, bytes) else 0


def validate_request_id(request_id: str) -> RequestId:
    if not (type(request_id) is str and _REQUEST_ID.fullmatch(request_id)):
        raise InvalidArgument("request_id", f"must be 1 to {limits.MAX_REQUEST_ID_CHARS} printable ASCII characters")
    return RequestId(request_id)


def validate_salt(field: str, salt: object) -> str:
    if not (isinstance(salt, str) and len(salt) <= limits.MAX_SALT_BYTES and salt.isascii()):
        raise InvalidArgument(field, f"must be ASCII, at most {limits.MAX_SALT_BYTES} bytes")
    return salt


# Admissions


def validate_admission(
    admission: Admission, *, vocab_size: int, context_tokens: int, eos_token_ids: Collection[int] = ()
) -> None:
    """Checks one admission of Worker.Schedule. Its sampling parameters must have been resolved."""
    if not (type(admission.seq_id) is str and _SEQUENCE_ID.fullmatch(admission.seq_id)):
        raise InvalidArgument("seq_id", "must be 32 hex digits")
    _check_number("epoch", admission.epoch, NumberRange(1, limits.U64_MAX, integer=True))
    _check_number("priority", admission.priority, NumberRange(1, 4, integer=True))
    _check_number("deadline_in_ms", admission.deadline_in_ms, NumberRange(0, limits.MAX_DEADLINE_MS, integer=True))
    salt, params = admission.salt, admission.sampling
    validate_salt("salt", salt)
    validate_sampling(params, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    for field in ("max_tokens", "seed"):
        if getattr(params, field) is None:
            raise InvalidArgument(f"sampling.{field}", "must be concrete in an admission; the router resolves it")
    validate_prompt(admission.prompt, vocab_size=vocab_size, context_tokens=context_tokens, field="prompt")
    room = context_tokens - len(admission.prompt)
    _check_outputs(admission.outputs, admission.finished_branches, params, vocab_size, room)


def _check_outputs(
    outputs: Sequence[Sequence[int]],
    finished_branches: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    room: int,
) -> None:
    num_branches = params.num_branches
    if len(outputs) not in (0, num_branches):
        raise InvalidArgument("outputs", f"{len(outputs)} lists for {num_branches} branches; send none or one for each")
    for branch, token_ids in enumerate(outputs):
        if params.max_tokens is None or not len(token_ids) <= params.max_tokens:
            raise InvalidArgument(
                f"outputs[{branch}]", f"{len(token_ids)} tokens exceed max_tokens ({params.max_tokens})"
            )
        if not len(token_ids) <= room:
            raise InvalidArgument(f"outputs[{branch}]", f"{len(token_ids)} tokens exceed the {room} left by the prompt")
        check_token_ids(f"outputs[{branch}]", token_ids, vocab_size)
    branches = _listed("finished_branches", finished_branches)
    check_token_ids("finished_branches", branches, num_branches, what="branch")
    if len(set(branches)) != len(branches):
        raise InvalidArgument("finished_branches", "names a branch twice")


# Shared


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


def _listed(field: str, values: object) -> Sequence[Any]:
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
