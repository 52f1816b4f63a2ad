"""What CUDA graphs do, on a CPU: a step is recorded operation by operation and replayed on the same memory.

    ops = SomeOps(RecordedExtension(module))         # an extension whose calls are recorded, or
    launch(kernel, tensor, ...)                      # in ops of a test's own, a kernel written in torch
    replay = StreamCapture()(step)

As on a device, nothing between the operations is done again: what Python computed is frozen, and so is every address.
An operation that would wait for the device, or bring numbers from the host, raises while capturing. What a graph
computed is garbage until it is replayed, and again after another graph was, because graphs share their memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Call = Callable[[], Any]
# They wait for the device, make shapes of what lies there, or come from host memory that is gone at the next replay.
NOT_CAPTURABLE = {
    "aten._local_scalar_dense",
    "aten.equal",
    "aten.is_nonzero",
    "aten.item",
    "aten.lift_fresh",
    "aten.masked_select",
    "aten.nonzero",
    "aten.repeat_interleave.Tensor",
    "aten.unique_dim",
    "aten._unique2",
}


class Recording(TorchDispatchMode):
    """The operations between the beginning and the end of a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.own: dict[int, Tensor] = {}  # memory the recording has made, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in NOT_CAPTURABLE or str(func).rpartition(".")[0] in NOT_CAPTURABLE or _masked(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        known = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        fresh = [x for x in made if _address(x) not in known]
        self.own |= {_address(x): x for x in fresh}

        def again() -> None:
            for old, new in zip(
                made, (x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)), strict=True
            ):
                if _address(old) != _address(new):
                    old.copy_(new)

        self.calls.append(again)
        return result

    def call(self, kernel: Callable[..., Any], *args: Any) -> Any:
        """Runs and records something that is no operation of torch's."""
        with _disable_current_modes():
            result = kernel(*args)
        self.calls.append(lambda: kernel(*args))
        return result

    def spoil(self) -> None:
        for tensor in self.own.values():
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            whole.fill_(_garbage(tensor.dtype))


_recording: list[Recording] = []


@contextmanager
def _begun() -> Iterator[Recording]:
    recording = Recording()
    _recording.append(recording)
    try:
        with recording:
            yield recording
    finally:
        _recording.pop()


class StreamCapture:
    """A graphs.Capturer."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replays: list[int] = []  # which recordings were replayed, in order

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        step()
        with _begun() as recording:
            result = step()
        number = len(self.recordings)
        self.recordings.append(recording)

        def replay() -> Tensor:
            self.replays.append(number)
            for other in self.recordings:
                other.spoil()
            for call in recording.calls:
                call()
            return result

        recording.spoil()
        return replay


def launch(kernel: Callable[..., None], *args: Any) -> None:
    """A kernel: it may look at the numbers in its tensors, because it does so anew whenever it is replayed."""
    if _recording:
        _recording[-1].call(kernel, *args)
    else:
        kernel(*args)


class RecordedExtension:
    """An extension whose launches are recorded; what it only computes on the host (plans, sizes) is not."""

    def __init__(self, extension: ModuleType) -> None:
        self._extension = extension

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._extension, name)
        if isinstance(found, type) or name.startswith(("plan_", "attention_", "device_", "take_")):
            return found
        return lambda *args: launch(found, *args)


def _garbage(dtype: torch.dtype) -> float | int | bool:
    """A value that, as an index or a length, leads out of every array."""
    if dtype.is_floating_point:
        return float("nan")
    return dtype == torch.bool or torch.iinfo(dtype).max


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _masked(func: Any, args: Any) -> bool:
    """x[mask] has as many rows as the mask has ones, which only the device knows."""
    indexing = str(func).startswith(("aten.index.", "aten.index_put"))
    return indexing and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1]))
