"""Whether a peer may make a call: by the role in its certificate, and by its API key where clients need one.

Whoever serves a call asks `current_tenant` whose it is. It is known from the moment on in which the call was let in, in
the task of the call and in tasks that are started there. A call that nobody has let in has no tenant where keys are.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from octavo.errors import PermissionDenied, Unauthenticated
from octavo.security.api_keys import ApiKeys
from octavo.security.roles import PeerRole, roles_allowed, roles_in
from octavo.security.tls import roles_of_peer

INFERENCE = "/octavo.v1.Inference/"
KEY_HEADER = "authorization"
ONE_TENANT = ""  # whose all requests are where there are no API keys

_tenant: ContextVar[str | None] = ContextVar("octavo_tenant", default=None)


class Authorizer:
    """Checks the calls of one listener. Without TLS and keys it lets every call pass."""

    def __init__(self, *, tls: bool = False, ask_callers: bool = True, keys: ApiKeys | None = None) -> None:
        """Without `ask_callers` the listener asks for no certificates, and counts everybody as a client."""
        self._tls = tls
        self._ask_callers = ask_callers
        self._keys = keys

    def authorize_call(self, method: str, context: Any) -> None:
        """Lets a gRPC call in, before anything of the request was looked at.

        Raises PermissionDenied or Unauthenticated.
        """
        self._require_role(method, lambda: _roles_of_call(context))
        if method.startswith(INFERENCE):
            metadata: Iterable[tuple[str, Any]] = (context.invocation_metadata() or ()) if self._keys else ()
            self._let_in(next((value for name, value in metadata if name == KEY_HEADER), ""))

    def authorize_request(self, scope: Any) -> None:
        """Lets an HTTP request of a client in, by its ASGI scope. Raises PermissionDenied or Unauthenticated.

        A certificate that may call Generate may send any request.
        """
        method, path = f"{INFERENCE}Generate", scope["path"]
        self._require_role(method, lambda: roles_of_peer(scope["state"]["peer_certificate"]), path)
        found = (value for name, value in scope["headers"] if name == KEY_HEADER.encode())
        self._let_in(next(found, b"").decode("latin-1"))

    def current_tenant(self) -> str:
        """The tenant whose call the running task serves. Raises Unauthenticated."""
        tenant = _tenant.get()
        if tenant is None and self._keys is not None:
            raise Unauthenticated("the call has not been let in")
        return tenant or ONE_TENANT

    def _require_role(self, method: str, roles_of_peer: Any, asked_for: str = "") -> None:
        if not self._tls:
            return
        roles = roles_of_peer() if self._ask_callers else frozenset({PeerRole.CLIENT})
        if not roles & roles_allowed(method):
            held = " and ".join(sorted(roles)) or "none"
            needed = " or ".join(sorted(roles_allowed(method))) or "none, as nobody may call it"
            raise PermissionDenied(f"{asked_for or method}: the certificate's role is {held}; the call needs {needed}")

    def _let_in(self, header: str | bytes) -> None:
        if self._keys is None:
            _tenant.set(ONE_TENANT)
            return
        text = header.decode("latin-1") if isinstance(header, bytes) else header
        scheme, _, key = text.partition(" ")
        tenant = self._keys.tenant_of(key.strip()) if scheme.lower() == "bearer" else None
        if tenant is None:
            said = "the API key is not valid" if key else "there is no API key"
            raise Unauthenticated(f"{said}: send the header `Authorization: Bearer KEY`")
        _tenant.set(tenant)


@contextmanager
def acting_for(tenant: str) -> Iterator[None]:
    """Inside, calls of an operator are about requests of that tenant."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def _roles_of_call(context: Any) -> frozenset[PeerRole]:
    found: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    if not found.get("x509_pem_cert"):
        return frozenset()
    return roles_in(name.decode("utf-8", "replace") for name in found.get("x509_subject_alternative_name", ()))
