"""Whether a peer may make a call: by the role in its certificate, and by its API key where clients need one.

Whoever serves a call asks `current_tenant` whose it is. It is known from the moment on in which the call was let in, in
the task of the call and in tasks that are started there. A call that nobody has let in has no tenant where keys are.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from octavo.metrics.value import MetricValue
from octavo.net.security.api_keys import STATES, ApiKey, ApiKeys, key_id, time_text
from octavo.net.security.roles import PeerRole, roles_allowed, roles_of_context, roles_of_peer
from octavo.net.security.trail import AccessReason, AccessTrail, Caller, ListenerKind, is_admin_call
from octavo.request.errors import InvalidArgument, PermissionDenied, Unauthenticated, closest
from octavo.request.limits import TenantQuota
from octavo.wire.channel import KEY_HEADER

INFERENCE = "/octavo.v1.Inference/"
ONE_TENANT = ""  # whose all requests are where there are no API keys

_tenant: ContextVar[str | None] = ContextVar("octavo_tenant", default=None)


class Authorizer:
    """Checks the calls of one listener. Without TLS and keys it lets every call pass."""

    def __init__(
        self,
        *,
        tls: bool = False,
        ask_callers: bool = True,
        keys: ApiKeys | None = None,
        trail: AccessTrail | None = None,
        listener: ListenerKind = ListenerKind.GRPC,
    ) -> None:
        """Without `ask_callers` the listener asks for no certificates, and counts everybody as a client.

        The trail is told of refusals, and of what operators call. `listener` is where gRPC calls come in.
        """
        self._tls = tls
        self._trail = trail
        self._listener = listener
        self._ask_callers = ask_callers
        self._keys = keys

    def authorize_call(self, method: str, context: Any) -> None:
        """Lets a gRPC call in, before anything of the request was looked at.

        Raises PermissionDenied or Unauthenticated.
        """
        try:
            self._require_role(method, lambda: roles_of_context(context.auth_context() or {}))
            if method.startswith(INFERENCE):
                metadata: Iterable[tuple[str, Any]] = (context.invocation_metadata() or ()) if self._keys else ()
                self._let_in(next((value for name, value in metadata if name == KEY_HEADER), ""))
        except AccessError as refused:
            has_certificate = bool((context.auth_context() or {}).get("x509_pem_cert"))
            self._note_refusal(self._listener, refused, Caller.of_call(context), method, has_certificate)
            raise refused.error from None

    def note_call(self, method: str, context: Any, request: Any) -> None:
        """Tells the trail of a call that was let in and whose request could be read, if it is one of operators."""
        if self._trail is None or not is_admin_call(method, by_router=False):
            return
        if is_admin_call(
            method, by_router=not self._tls or PeerRole.ROUTER in roles_of_context(context.auth_context() or {})
        ):
            self._trail.note_admin_call(method, Caller.of_call(context), request)

    def authorize_request(self, scope: Any) -> None:
        """Lets an HTTP request of a client in, by its ASGI scope. Raises PermissionDenied or Unauthenticated.

        A certificate that may call Generate may send any request.
        """
        method, path = f"{INFERENCE}Generate", scope["path"]
        certificate = scope["state"]["peer_certificate"]
        try:
            self._require_role(method, lambda: roles_of_peer(certificate), path)
            found = (value for name, value in scope["headers"] if name == KEY_HEADER.encode())
            self._let_in(next(found, b"").decode("latin-1"))
        except AccessError as refused:
            self._note_refusal(ListenerKind.HTTP, refused, Caller.of_request(scope), path, bool(certificate))
            raise refused.error from None

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
            said = f"{asked_for or method}: the certificate's role is {held}; the call needs {needed}"
            raise AccessError(AccessReason.ROLE, PermissionDenied(said))

    def _let_in(self, header: str | bytes) -> None:
        if self._keys is None:
            _tenant.set(ONE_TENANT)
            return
        text = header.decode("latin-1") if isinstance(header, bytes) else header
        scheme, _, key = text.partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        found = self._keys.find(key) if key else None
        if found is None or found.expired:
            raise _why_not(found, key, text)
        _tenant.set(found.tenant)

    def current_quota(self, default: TenantQuota) -> TenantQuota:
        """The limits of the tenant whose call the running task serves. Raises Unauthenticated."""
        tenant = self.current_tenant()
        return default if self._keys is None else self._keys.quota_of(tenant, default)

    def require_tenant(self, tenant: str) -> None:
        """Raises InvalidArgument unless requests of this tenant can come."""
        if self._keys is None:
            if tenant != ONE_TENANT:
                raise InvalidArgument("tenant", "there are no API keys here, so requests have no tenant; leave it out")
            return
        tenants = self._keys.tenants
        if tenant not in tenants:
            known = f"no API key is of this tenant{closest(tenant, tenants)}"
            raise InvalidArgument("tenant", known if tenant else "requests here have tenants; say whose it is for")

    def values(self) -> Iterator[MetricValue]:
        """A source of metric values: the keys, none of them where there is no file of keys."""
        if self._keys is not None:
            yield from self._keys.values()
        else:
            yield from (MetricValue("octavo_api_keys", 0, (state,)) for state in STATES)

    def _note_refusal(
        self, listener: ListenerKind, refused: "AccessError", caller: Caller, method: str, has_certificate: bool
    ) -> None:
        if self._trail is None:
            return
        reason = refused.reason
        if reason is AccessReason.ROLE and self._ask_callers and not has_certificate:
            reason = AccessReason.NO_CERTIFICATE
        if refused.key_id:
            caller = Caller(caller.peer, f"{caller.subject} {refused.key_id}".lstrip())
        self._trail.note_refusal(listener, reason, caller, method)


class AccessError(Exception):
    """A call is refused, with this error, for that reason. It stays within this module."""

    def __init__(self, reason: AccessReason, error: PermissionDenied | Unauthenticated, key_id: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
        self.key_id = key_id  # of the key that came with the call; never the key


def _why_not(found: ApiKey | None, key: str, header: str) -> AccessError:
    """Why a call without a valid key is refused: with one that has expired, with another one, or with none."""
    if found is not None:
        when = time_text(found.expires_at)
        said = f"the API key has expired, at {when}: ask for another one, and send it as"
        return AccessError(AccessReason.EXPIRED_KEY, Unauthenticated(f"{said} `Authorization: Bearer KEY`"), found.id)
    said = "the API key is not valid" if header else "there is no API key"
    reason, id = (AccessReason.UNKNOWN_KEY, key_id(key)) if key else (AccessReason.NO_KEY, "")
    return AccessError(reason, Unauthenticated(f"{said}: send the header `Authorization: Bearer KEY`"), id)


@contextmanager
def acting_for(tenant: str) -> Iterator[None]:
    """Inside, calls of an operator are about requests of that tenant."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)
