"""Says what a silent request waits for, so that no command waits without a word."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from octavo.cli.output import print_error
from octavo.client import Client
from octavo.request.errors import ServingError

INTERVAL_S = 3.0
END_S = 1.0  # how long a question may delay the command's end


class QueueNotice:
    """Asks every few seconds where the request is, and says so once each time it waits in the queue."""

    def __init__(self, command: str, client: Client, request_id: str) -> None:
        self._command = command
        self._client = client
        self._request_id = request_id
        self._told = False
        self._over = threading.Event()

    def watch(self) -> None:
        """Runs in a thread of its own until the request is over."""
        while not self._over.wait(INTERVAL_S):
            try:
                waits = self._client.get(self._request_id).state == "QUEUED"
            except (ServingError, CancelledError, RuntimeError):  # the call itself tells; or the client is closed
                continue
            if waits and not self._told and not self._over.is_set():
                text = f"request {self._request_id} waits in the queue: no worker has taken it"
                print_error(self._command, f"{text}; `octavo status` says why, and Ctrl-C gives the request up")
            self._told = waits

    def end(self) -> None:
        self._over.set()


@contextmanager
def queue_notice(command: str, client: Client, request_id: str) -> Iterator[None]:
    """Inside the context, stderr is told when the request waits in the queue for longer than a moment."""
    notice = QueueNotice(command, client, request_id)
    thread = threading.Thread(target=notice.watch, name="queue-notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        notice.end()
        thread.join(END_S)
