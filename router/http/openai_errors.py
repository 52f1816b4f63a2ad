"""How an error looks to OpenAI's clients: an HTTP status, a body, and headers that say when to retry."""

import math
import re
from typing import Any

from octavo.request.errors import Code, InvalidArgument, MessageTooLarge, NotFound, ServingError

# OpenAI's SDKs retry 408, 409, 429 and every status from 500 on, so no error that a retry cannot help has one of these
# but a conflict, which they meet only if they choose request ids.
STATUSES = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# The names of fields in octavo.v1 that have other names in OpenAI's bodies.
FIELDS = [
    (re.compile(r"^sampling\.include_stop$"), "include_stop_str_in_output"),
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^chat\.messages"), "messages"),
    (re.compile(r"^chat\.tools"), "tools"),
    (re.compile(r"^chat$"), "messages"),
    (re.compile(r"^(text|raw_text|token_ids)$"), "prompt"),
    (re.compile(r"\.raw_content$"), ".content"),
]


def status_of(error: ServingError) -> int:
    if isinstance(error, MessageTooLarge):
        return 413
    return STATUSES.get(error.code, 500)


def headers_of(error: ServingError) -> list[tuple[bytes, bytes]]:
    """The headers that say when to come back: in whole seconds for HTTP, in milliseconds for OpenAI's SDKs."""
    if not error.retry_after_ms:
        return []
    seconds = max(1, math.ceil(error.retry_after_ms / 1000))
    return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % error.retry_after_ms)]


def content_of(error: ServingError) -> dict[str, Any]:
    """The body: {"error": {"message", "type", "param", "code"}}. `param` is the first wrong field."""
    message, param, code = error.message, None, error.reason.lower()
    if isinstance(error, InvalidArgument) and error.violations:
        named = [(field_name(field), what) for field, what in error.violations]
        message, param = "; ".join(f"{field}: {what}" for field, what in named), named[0][0]
    elif isinstance(error, NotFound) and error.resource == "model":
        param, code = "model", "model_not_found"
    status = status_of(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def field_name(field: str) -> str:
    """A field of octavo.v1 as OpenAI's bodies name it."""
    for pattern, name in FIELDS:
        field = pattern.sub(name, field)
    return field
