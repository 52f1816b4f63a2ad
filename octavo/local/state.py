"""The state that `octavo up` writes down for the other commands, in STATE_DIR/state.json."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from octavo.process.command_error import CommandError

FILE = "state.json"
LOCK = "up.lock"
CHOOSE_ANOTHER = "choose another with --state-dir"

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ExitHistory:
    """How often a process has ended since `octavo up` began, or could not be started, and why the last time."""

    count: int = 0
    last_reason: str = ""
    last_at: float = 0.0  # Unix time

    def another(self, reason: str) -> "ExitHistory":
        return ExitHistory(self.count + 1, reason, time.time())


@dataclass(slots=True)
class RouterState:
    """A router of `octavo up`: its process and its addresses."""

    router_id: str
    pid: int | None
    endpoint: str
    admin_endpoint: str
    web: str = ""  # where /metrics and /health are
    http: str = ""  # where OpenAI's clients call, without the /v1
    exits: ExitHistory = ExitHistory()


@dataclass(slots=True)
class WorkerState:
    """A worker of `octavo up`: its process and its addresses."""

    worker_id: str
    pid: int | None
    endpoint: str
    web: str = ""
    exits: ExitHistory = ExitHistory()


@dataclass(slots=True)
class StoreState:
    """The store of `octavo up`."""

    url: str
    pid: int | None
    embedded: bool
    exits: ExitHistory = ExitHistory()


@dataclass(slots=True)
class ClusterState:
    """The processes of a running `octavo up`. A pid is None while its process is being restarted."""

    pid: int
    model: str
    state_dir: str
    store: StoreState
    routers: list[RouterState] = field(default_factory=list)
    workers: list[WorkerState] = field(default_factory=list)
    ready: bool = False
    tls: str = ""  # folder of the certificates with which everything runs; empty: without TLS, or with given ones

    @property
    def endpoints(self) -> list[str]:
        return [router.endpoint for router in self.routers]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "endpoints": self.endpoints}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ClusterState":
        def made(kind: type[P], each: dict[str, Any]) -> P:
            return kind(**{**each, "exits": ExitHistory(**each["exits"])})

        parts: dict[str, Any] = {
            "store": made(StoreState, data["store"]),
            "routers": [made(RouterState, router) for router in data["routers"]],
            "workers": [made(WorkerState, worker) for worker in data["workers"]],
        }
        plain = {name: value for name, value in data.items() if name not in (*parts, "endpoints")}
        return cls(**plain, **parts)


class AlreadyRunningError(CommandError):
    """Another `octavo up` uses the state directory."""


class StateDirectoryError(CommandError):
    """The state directory cannot be used."""


def directory_of(text: str | None) -> Path:
    """The directory that --state-dir names; without a name, that of the user. Raises StateDirectoryError."""
    try:
        return Path(text).expanduser().absolute() if text else Path.home() / ".local" / "state" / "octavo"
    except RuntimeError:
        raise StateDirectoryError("no home directory is known: say with --state-dir where the state is") from None


def existing_part(directory: Path) -> Path:
    return next(parent for parent in (directory, *directory.parents) if parent.exists())


def fault_of(directory: Path) -> str:
    """Why no state can be written to the directory, or to where it would be made; empty if it can."""
    try:
        existing = existing_part(directory)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not existing.is_dir():
        return f"{existing} is not a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return ""


def _opened_lock(directory: Path) -> TextIO:
    fault = fault_of(directory)
    if fault:
        raise StateDirectoryError(f"{fault}: {CHOOSE_ANOTHER}")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return (directory / LOCK).open("a+")
    except OSError as error:
        raise StateDirectoryError(f"{error.filename}: {error.strerror}: {CHOOSE_ANOTHER}") from None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks the directory for one `octavo up`. The kernel releases the lock when the process ends, however it ends.

    Raises AlreadyRunningError or StateDirectoryError.
    """
    with _opened_lock(directory) as lock:
        for wait_s in (0.01, 0.05, 0.25, 0.0):  # a reader may hold the lock for a moment
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(wait_s)
        else:
            raise AlreadyRunningError(
                f"another `octavo up` uses {directory}: end it, or give this one its own --state-dir"
            )
        remove(directory)  # left by an `octavo up` that was killed; a reader must not take it for this one's
        yield


def write(directory: Path, state: ClusterState) -> None:
    """Replaces the file in one step: a reader sees the old state or the new one."""
    replace_file(directory / FILE, f"{json.dumps(state.to_json(), indent=2)}\n".encode())  # a URL may hold a password


def replace_file(file: Path, content: bytes) -> None:
    """Writes a file in one step. Nobody else can read it, not even for a moment. Raises OSError."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(content)
    temporary.replace(file)


def remove(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)


def read(directory: Path) -> ClusterState | None:
    """The state of the `octavo up` that runs on this directory; None if none does. Raises StateDirectoryError."""
    try:
        with (directory / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise StateDirectoryError(f"{existing_part(directory)} is not a directory: {CHOOSE_ANOTHER}") from None
    except OSError:
        pass  # another process holds the lock: `octavo up` runs; or another user does
    try:
        return ClusterState.from_json(json.loads((directory / FILE).read_text()))
    except PermissionError:
        raise StateDirectoryError(f"{directory} belongs to another user: {CHOOSE_ANOTHER}") from None
    except (OSError, ValueError, KeyError, TypeError):
        return None
