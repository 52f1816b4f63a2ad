"""The one validator, used where requests enter a router and where admissions enter a worker.

Every function returns, or raises errors.InvalidArgument with each wrong field, what is wrong, and what would be right.
It raises nothing else, whatever the value. A value that passes cannot raise an error inside the engine. Comparisons are
written positively (`low <= value <= high`), so that NaN fails them. Messages never quote a prompt or a stop string.
Sampling parameters have a module of their own, `sampling_validation`.
"""

import re
from collections.abc import Collection, Sequence

from octavo.request import limits
from octavo.request.errors import InvalidArgument, ViolationCollector
from octavo.request.ids import RequestId, SequenceId
from octavo.request.limits import NumberRange
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams
from octavo.request.sampling_validation import check_number, check_token_ids, require_list, validate_sampling

_REQUEST_ID = re.compile(rf"[ -~]{{1,{limits.MAX_REQUEST_ID_CHARS}}}")
_SEQUENCE_ID = re.compile(r"[0-9a-f]{32}")


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


def validate_sequence_id(field: str, seq_id: object) -> SequenceId:
    if not (type(seq_id) is str and _SEQUENCE_ID.fullmatch(seq_id)):
        raise InvalidArgument(field, "must be 32 hex digits")
    return SequenceId(seq_id)


def validate_adapter(digest: object, source: object) -> None:
    """Checks which low-rank adapter a sequence runs with, and where it is read; both empty: none."""
    if not (type(digest) is str and (not digest or _SEQUENCE_ID.fullmatch(digest))):
        raise InvalidArgument("lora", "must be 32 hex digits, or empty")
    if not (type(source) is str and bool(source) == bool(digest) and len(source) <= limits.MAX_ADAPTER_SOURCE):
        raise InvalidArgument("lora_source", f"must be a path of at most {limits.MAX_ADAPTER_SOURCE} characters")


# Admissions


def validate_admission(
    admission: Admission, *, vocab_size: int, context_tokens: int, eos_token_ids: Collection[int] = ()
) -> None:
    """Checks one admission of Worker.Schedule. Its sampling parameters must have been resolved."""
    validate_sequence_id("seq_id", admission.seq_id)
    check_number("epoch", admission.epoch, NumberRange(1, limits.U64_MAX, integer=True))
    check_number("priority", admission.priority, NumberRange(1, 4, integer=True))
    check_number("deadline_in_ms", admission.deadline_in_ms, NumberRange(0, limits.MAX_DEADLINE_MS, integer=True))
    salt, params = admission.salt, admission.sampling
    validate_salt("salt", salt)
    validate_adapter(admission.lora, admission.lora_source)
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
    branches = require_list("finished_branches", finished_branches)
    check_token_ids("finished_branches", branches, num_branches, what="branch")
    if len(set(branches)) != len(branches):
        raise InvalidArgument("finished_branches", "names a branch twice")
