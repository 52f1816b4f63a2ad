"""Errors as clients of responses expect them."""

from typing import Any

from octavo.request.errors import NotFound, ServingError
from router.http.reply import Reply

PREVIOUS = "previous_response"


class ResponseReply(Reply):
    """One answer."""

    def shown_error(self, error: ServingError) -> dict[str, Any]:
        shown = super().shown_error(error)
        if isinstance(error, NotFound) and error.resource == PREVIOUS:
            shown["error"] |= {"param": "previous_response_id", "code": "previous_response_not_found"}
        return shown
