"""In which order a device makes the copies that other threads begin, and the steps of the engine's thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepMark:
    """Marks where the last step that was run ends in the work of a device, so that copies begin after it.

    They do not wait for the step under way. On a CPU nothing has to wait.

    A step that has been run may still be computing: the engine's thread does not wait for a piece of a prompt. Blocks
    may be held or pinned while a step runs. That step uses only blocks of its tables, and writes to none that is
    pinned, so the steps before the mark are all that copies have to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stepped: torch.cuda.Event | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._stepped = torch.cuda.Event()
                self._stream = torch.cuda.Stream(device)
                self.note_steps()  # what has set the memory up

    def note_steps(self) -> None:
        """Sets the mark: all work of a step is queued on the current stream. The engine's thread calls it."""
        if self._stepped is not None:
            self._stepped.record()

    @contextmanager
    def after_steps(self) -> Iterator[None]:
        """Inside, a stream of the device is current whose work begins when the work before the mark is done.

        Any thread may call it, and none waits.
        """
        if self._stepped is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._stepped)
            yield

    def wait_for_copies(self) -> None:
        """Waits for the work that was queued inside `after_steps`."""
        if self._stepped is not None:
            self._stream.synchronize()
