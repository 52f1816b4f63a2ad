"""The files of the page, as they are in the package. A browser may keep them, and asks whether they have changed."""

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("dashboard.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}
# Nothing from elsewhere, nothing inline, and no other page around this one.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
)


class StaticFile:
    """One file, read once."""

    def __init__(self, name: str, content_type: str) -> None:
        self._body = (files("router.dashboard") / name).read_bytes()
        tag = f'"{hashlib.sha256(self._body).hexdigest()[:16]}"'
        self._headers = {**HEADERS, "content-type": content_type, "etag": tag}

    async def answer(self, request: Request) -> Response:
        """The file, or 304 where the browser has it."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)


def static_routes() -> list[Route]:
    return [Route(path, StaticFile(*described).answer) for path, described in FILES.items()]
