"""The thread in which the engine of an AsyncLLM makes its steps."""

import contextlib
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from gpu_worker.offline.live.live_requests import LiveRequests
from gpu_worker.offline.live.mailbox import Mailbox
from gpu_worker.offline.offline_engine import OfflineEngine
from gpu_worker.offline.offline_request import OfflineRequest
from gpu_worker.offline.outputs import RequestOutput
from octavo.request.errors import RunnerFailed

T = TypeVar("T")
log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0  # how long `stop` waits for the step in flight


class EngineThread:
    """Any thread may call it."""

    def __init__(self, engine: OfflineEngine) -> None:
        self.error: Exception | None = None  # why it has ended by itself
        self.stopped = False
        self._live = LiveRequests(engine)
        self._mailboxes: dict[str, Mailbox] = {}  # of requests that have not ended; the thread's own
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()  # of `stopped` and `error`: no command comes after them
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def add(self, request_id: str, request: OfflineRequest, mailbox: Mailbox) -> "Future[None]":
        """Begins a request. The future's error is InvalidArgument, TooLarge, or RunnerFailed: the engine has ended."""
        added: Future[None] = Future()

        def command() -> None:
            try:
                self.check_running()
                self._live.add(request_id, request, mailbox.kind)
            except Exception as error:
                added.set_exception(error)
                return
            self._mailboxes[request_id] = mailbox
            added.set_result(None)

        self._post(command)
        return added

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Calls the function between two steps. The future's error may be RunnerFailed: the engine has ended."""
        called: Future[T] = Future()

        def command() -> None:
            try:
                self.check_running()
                called.set_result(function())
            except Exception as error:
                called.set_exception(error)

        self._post(command)
        return called

    def abort(self, request_ids: Sequence[str], mailbox: Mailbox | None = None) -> None:
        """Ends requests, whose mailboxes get their last output. It does nothing if the engine has ended.

        With `mailbox` none ends whose outputs go to another one: an id may have been used again.
        """

        def command() -> None:
            if self.error is not None:
                return  # its readers are told so, and nobody may use the scheduler any more
            meant = [each for each in request_ids if mailbox is None or self._mailboxes.get(each) is mailbox]
            self._deliver(self._live.abort(meant))

        with contextlib.suppress(RunnerFailed):
            self._post(command)

    def check_running(self) -> None:
        """Raises RunnerFailed if it has ended."""
        if self.error is not None or self.stopped:
            raise RunnerFailed(f"the engine has ended: {self.error or 'it was shut down'}")

    def stop(self) -> bool:
        """Ends after the step in flight; requests that have not ended fail. False if that step still runs."""
        with self._lock:
            self.stopped = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            self.check_running()
            self._commands.append(command)
        self._wake.set()

    def _loop(self) -> None:
        try:
            while True:
                self._wake.clear()
                if self.stopped:  # looked at after that, or a stop between them would wake nobody
                    break
                while self._commands:
                    self._commands.popleft()()
                if len(self._live):
                    self._deliver(self._live.step())
                else:
                    self._wake.wait()
        except Exception as error:
            log.exception("the engine has ended; nothing runs here any more")
            with self._lock:
                self.error = error
        self._fail_all()

    def _fail_all(self) -> None:
        """What still waits for the engine learns that it has ended."""
        try:
            self.check_running()
        except RunnerFailed as error:
            for mailbox in self._mailboxes.values():
                _call(mailbox, mailbox.fail, error)
        self._mailboxes.clear()
        for command in self._commands:  # they find that nothing may begin any more
            command()

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        by_loop: dict[object, list[tuple[Mailbox, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            by_loop[mailbox.loop].append((mailbox, output))
            if output.finished:
                del self._mailboxes[output.request_id]
        for some in by_loop.values():
            if not _call(some[0][0], _put_all, some):  # its loop is closed: nobody reads
                self._live.abort([output.request_id for _, output in some])
                for _, output in some:
                    self._mailboxes.pop(output.request_id, None)


def _put_all(some: Sequence[tuple[Mailbox, RequestOutput]]) -> None:
    for mailbox, output in some:
        mailbox.put(output)


def _call(mailbox: Mailbox, function: Callable[..., None], argument: object) -> bool:
    """Has the mailbox's loop call the function. False if the loop is closed."""
    try:
        mailbox.loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        return False
    return True
