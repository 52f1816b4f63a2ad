"""What a process tells of the calls that it has refused, and of what operators have asked: counters, and log lines.

A line names the peer's address, the subject (the names in its certificate, or the id of its API key) and the method. It
never has a key, and nothing of what a request says but which request, worker, prefix or adapter an operator has named.
"""

import logging
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from octavo.metrics.value import MetricValue
from octavo.net.security.roles import subject_of_context, subject_of_peer
from octavo.process import telemetry

log = logging.getLogger(__name__)

BURST = 10  # lines about one reason at one listener that may come at once, and after that
LINES_PER_S = 1.0
MAX_TEXT = 200  # characters of what a peer says of itself
NAMED_FIELDS = (
    *("worker_id", "request_id", "tenant", "seq_id", "operation", "undo", "grace_ms"),
    *("name", "source", "model"),  # of prefixes and adapters
)
ADMIN, WORKER = "/octavo.v1.Admin/", "/octavo.internal.v1.Worker/"
MIGRATE = f"{WORKER}Migrate"
CHANGING = ("Migrate", "DrainWorker", "AddPrefix", "RemovePrefix", "AddAdapter", "RemoveAdapter")
CHANGES = (
    *(f"{ADMIN}{each}" for each in CHANGING),
    f"{WORKER}Drain",
    f"{WORKER}Swap",
    MIGRATE,
)
LOOKS = tuple(f"{ADMIN}{name}" for name in ("ListWorkers", "ListSequences", "ExplainPlacement", "WatchCluster"))
ADMIN_CALLS = frozenset((*LOOKS, *CHANGES))


class ListenerKind(StrEnum):
    """Where a process listens."""

    GRPC = "grpc"  # clients of a router
    HTTP = "http"
    ADMIN = "admin"
    WORKER = "worker"
    PAGES = "pages"  # --web-listen
    BLOCKS = "blocks"  # a worker's, on which blocks come


class AccessReason(StrEnum):
    """Why a call was refused before anybody looked at what it asks."""

    NO_CERTIFICATE = "no_certificate"
    ROLE = "role"  # the certificate has none that may call this
    NO_KEY = "no_key"
    UNKNOWN_KEY = "unknown_key"
    EXPIRED_KEY = "expired_key"
    HANDSHAKE = "handshake"  # of TLS: no certificate of --tls-ca, an old one, or no TLS at all
    HOST = "host"  # an HTTP request for another name than this listener's
    ORIGIN = "origin"  # an HTTP request of a page that may not call


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, as far as the process knows it."""

    peer: str = ""  # address and port
    subject: str = ""  # of its certificate, or the id of its key; empty: nobody has asked it, or it has neither

    @classmethod
    def of_call(cls, context: Any) -> "Caller":
        """Who makes a gRPC call."""
        return cls(unquote(context.peer() or ""), _subject(subject_of_context(context.auth_context() or {})))

    @classmethod
    def of_request(cls, scope: Any) -> "Caller":
        """Who sends an HTTP request, by its ASGI scope."""
        certificate = scope.get("state", {}).get("peer_certificate")
        return cls(":".join(map(str, scope.get("client") or ())), _subject(subject_of_peer(certificate)))


class LineLimiter:
    """Lets BURST lines through at once, and then LINES_PER_S, and counts those between."""

    def __init__(self, now: float) -> None:
        self._tokens, self._at, self._held_back = float(BURST), now, 0

    def admit(self, now: float) -> int | None:
        """How many lines were held back since the last one; None: this one is held back, too."""
        self._tokens = min(float(BURST), self._tokens + (now - self._at) * LINES_PER_S)
        self._at = now
        if self._tokens < 1:
            self._held_back += 1
            return None
        self._tokens -= 1
        held_back, self._held_back = self._held_back, 0
        return held_back


class AccessTrail:
    """The refusals and the calls of operators of one process. Thread-safe."""

    def __init__(self, *listeners: ListenerKind, clock: Callable[[], float] | None = None) -> None:
        """Each reason counts from 0 on at each of the listeners, so that the first refusal is seen to be one more."""
        self._clock = clock
        self._lock = threading.Lock()
        self._refusals = Counter({(listener, reason): 0 for listener in listeners for reason in AccessReason})
        own = (ListenerKind.ADMIN, ADMIN), (ListenerKind.WORKER, WORKER)
        served = tuple(prefix for listener, prefix in own if listener in listeners)
        self._calls = Counter({method: 0 for method in (*LOOKS, *CHANGES) if method.startswith(served)})
        self._limiters: dict[object, LineLimiter] = {}

    def note_refusal(
        self, listener: ListenerKind, reason: AccessReason, caller: Caller, method: str, detail: str = ""
    ) -> None:
        """Counts and logs a refused call. `method` may be a text of the peer, such as the path of an HTTP request."""
        with self._lock:
            self._refusals[listener, reason] += 1
        facts = {"listener": listener.value, "reason": reason.value, "method": printable(method)}
        self._write(logging.WARNING, "call refused", (listener, reason), caller, facts, printable(detail))

    def note_admin_call(self, method: str, caller: Caller, request: Any) -> None:
        """An operator's call was let in. One that changes something is always logged."""
        with self._lock:
            self._calls[method] += 1
        named = {name: getattr(request, name, None) for name in NAMED_FIELDS}
        facts = {"method": method.strip("/"), **{name: printable(str(v)) for name, v in named.items() if v}}
        self._write(logging.INFO, "admin call", None if method in CHANGES else method, caller, facts)

    def values(self) -> Iterator[MetricValue]:
        """A source of metric values."""
        with self._lock:
            refusals, calls = dict(self._refusals), dict(self._calls)
        for (listener, reason), count in refusals.items():
            yield MetricValue("octavo_calls_refused_total", count, (listener.value, reason.value))
        for method, count in calls.items():
            yield MetricValue("octavo_admin_calls_total", count, (method.rpartition(".")[2],))

    def _write(
        self, level: int, text: str, key: object, caller: Caller, facts: dict[str, str], detail: str = ""
    ) -> None:
        """Logs a line about the caller, unless there were too many with this key; None: always."""
        held_back: int | None = 0
        if key is not None:
            with self._lock:
                now = self._clock() if self._clock else time.monotonic()
                held_back = self._limiters.setdefault(key, LineLimiter(now)).admit(now)
        if held_back is None:
            return
        more: dict[str, str | int] = {
            "peer": caller.peer,
            "subject": caller.subject,
            "detail": detail,
            "held_back": held_back,
        }
        with telemetry.about(**facts, **{name: value for name, value in more.items() if value}):
            log.log(level, text)


def is_admin_call(method: str, *, by_router: bool) -> bool:
    """Whether operators make this call. Routers call Migrate by themselves; `by_router`: the caller may be one."""
    return method in ADMIN_CALLS and not (by_router and method == MIGRATE)


def printable(text: str) -> str:
    """The text as one word of ASCII, cut where it is long.

    A peer may have sent anything, such as a path that looks like further fields of the log line.
    """
    return ascii(text)[1:-1].replace(" ", r"\x20")[:MAX_TEXT]


class NotedHandshake(ssl.SSLObject):
    """A handshake of a listener's connection that is told of when it fails. A context makes it for each connection."""

    note_failure: Callable[[str], None]

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self.note_failure(str(error.reason or error))
            raise


def note_handshakes(context: ssl.SSLContext, note_failure: Callable[[str], None]) -> None:
    """Has `note_failure` told why a handshake of the context has failed. The event loop knows no peer by then."""
    context.sslobject_class = type("NotedHandshake", (NotedHandshake,), {"note_failure": staticmethod(note_failure)})


def _subject(names: Iterable[str]) -> str:
    return " ".join(map(printable, names))[:MAX_TEXT]
