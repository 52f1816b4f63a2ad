"""Errors and signs of life as Anthropic's clients expect them."""

import json
from typing import Any

from octavo.request.errors import ServingError
from router.http.reply import Reply, content_of, status_of

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageReply(Reply):
    """One answer. An error of a stream is an event, and the last one."""

    PING = b'event: ping\ndata: {"type": "ping"}\n\n'

    def shown_error(self, error: ServingError) -> dict[str, Any]:
        status = status_of(error)
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        shown: dict[str, Any] = {"type": kind, "message": content_of(error)["error"]["message"]}
        named = {"request_id": self.request_id} if self.request_id else {}
        return {"type": "error", "error": shown, **named}

    def error_event(self, error: ServingError) -> bytes:
        return b"event: error\ndata: " + json.dumps(self.shown_error(error)).encode() + b"\n\n"

    def _names(self) -> list[tuple[bytes, bytes]]:
        own = [(b"request-id", self.request_id.encode())] if self.request_id else []
        return super()._names() + own
