"""Lets nobody but operators see the pages of a program, once there is TLS."""

import json
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from octavo.net.security.roles import PeerRole, roles_of_peer
from octavo.net.security.trail import AccessReason, AccessTrail, Caller, ListenerKind

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]
REFUSAL = json.dumps({"error": "this page needs a certificate with the role operator"}).encode()


class OperatorGate:
    """An ASGI application around another one. Whoever has no operator's certificate sees the open paths alone.

    An open path is open with all that is below it: /health/alive is as open as /health.
    """

    def __init__(
        self, app: AsgiApp, open_paths: Collection[str] = ("/health",), trail: AccessTrail | None = None
    ) -> None:
        self._app = app
        self._trail = trail
        self._open_paths = open_paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._is_open(scope["path"]) or PeerRole.OPERATOR in roles_of_peer(scope["state"]["peer_certificate"]):
            await self._app(scope, receive, send)
            return
        if self._trail is not None:
            known = scope["state"]["peer_certificate"]
            reason = AccessReason.ROLE if known else AccessReason.NO_CERTIFICATE
            self._trail.note_refusal(ListenerKind.PAGES, reason, Caller.of_request(scope), scope["path"])
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": REFUSAL})

    def _is_open(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in self._open_paths)
