"""What a caller says of its request in headers: its deadline and its name."""

import math

from starlette.types import Scope

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from router.http.json_body import header_of

TIMEOUT_HEADER = b"x-request-timeout-ms"
ID_HEADER = b"idempotency-key"


def remaining_s(scope: Scope) -> float | None:
    """The seconds that the client gives the request; None: as many as it needs. OpenAI's clients never say it."""
    text = header_of(scope, TIMEOUT_HEADER)
    if not text:
        return None
    try:
        timeout_ms = float(text)
    except ValueError:
        timeout_ms = math.nan
    if not 0 < timeout_ms <= limits.MAX_DEADLINE_MS:
        name = TIMEOUT_HEADER.decode()
        raise InvalidArgument(name, f"must be a number of milliseconds, above 0, at most {limits.MAX_DEADLINE_MS}")
    return timeout_ms / 1000


def chosen_id(scope: Scope) -> str:
    """The id that the client has chosen for its request, to make retries safe; empty if it has not.

    X-Request-Id is not read: proxies put one on every request, and some clients one on many.
    """
    return header_of(scope, ID_HEADER)
