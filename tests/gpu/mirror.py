"""Lets the cases of tests/csrc/simt_cases, which lie in host memory, run on a device.

Each op's arguments are copied to memory of the device that has the same gaps and the same alignment, the op runs there,
and everything is copied back. Slow, and that does not matter: the cases are small.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BYTES = (4, 2, 2, 1, 1, 4, 8)  # of an element, as octavo::DType counts types
KEPT_BITS = 255  # of an address
Range = tuple[int, int]


class Held:
    """Arguments of one of the extension's own types, which can be made only when the copies are there."""

    name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


class Mirror:
    """The extension, for tensors in host memory."""

    def __init__(self, extension: Any, device: torch.device) -> None:
        self._extension, self._device = extension, device
        for name in ("KvCache", "Attention", "Plan"):
            setattr(self, name, type(name, (Held,), {"name": name}))
        mirror = self

        class Swapper:
            """Has copied when `start` returns."""

            def __init__(self) -> None:
                self._swapper = extension.Swapper()

            def start(self, *args: Any) -> int:
                return mirror.call(lambda *there: self._swapper.wait(self._swapper.start(*there)) or 0, args)

            def done(self, ticket: int) -> bool:
                return ticket == 0

            def wait(self, ticket: int) -> None:
                pass

            def let_wait(self, ticket: int, stream: int) -> None:
                pass

        self.Swapper = Swapper

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._extension, name)
        if name.startswith(("_", "plan_", "attention_", "device_")) or isinstance(found, type):
            return found
        return lambda *args: self.call(found, args)

    def call(self, op: Any, args: tuple[Any, ...]) -> Any:
        copies = [self._copy(span) for span in merged(spans(args))]
        try:
            return op(*(self._there(arg, copies) for arg in args))
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            for (begin, end), memory, _ in copies:
                host(begin, end).copy_(memory)

    def _copy(self, span: Range) -> tuple[Range, Tensor, int]:
        """(what was copied, the copy, where it begins)."""
        begin, end = span
        whole = torch.empty(end - begin + 2 * KEPT_BITS + 1, dtype=torch.uint8, device=self._device)
        shift = (begin - whole.data_ptr()) & KEPT_BITS
        memory = whole[shift : shift + end - begin]
        memory.copy_(host(begin, end))
        return span, memory, whole.data_ptr() + shift

    def _there(self, value: Any, copies: list[tuple[Range, Tensor, int]]) -> Any:
        if isinstance(value, Held):
            args = [self._there(arg, copies) for arg in value.args]
            kwargs = {name: self._there(arg, copies) for name, arg in value.kwargs.items()}
            return getattr(self._extension, value.name)(*args, **kwargs)
        if not is_ref(value):
            return value
        for (begin, end), _, place in copies:
            if begin <= value[0] < end:
                return (value[0] - begin + place, *value[1:])
        return value  # nothing is there


def is_ref(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 4 and isinstance(value[2], tuple)


def spans(values: Any) -> Iterator[Range]:
    """Where the tensors among arguments lie."""
    for value in values:
        if isinstance(value, Held):
            yield from spans((*value.args, *value.kwargs.values()))
        elif is_ref(value):
            address, dtype, shape, strides = value
            if address and all(shape):
                reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
                low, high = (sum(pick(0, r) for r in reach) for pick in (min, max))
                yield address + low * BYTES[dtype], address + (high + 1) * BYTES[dtype]


def merged(found: Iterator[Range]) -> list[Range]:
    """The ranges, in which those that overlap have become one."""
    result: list[Range] = []
    for begin, end in sorted(found):
        if result and begin < result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def host(begin: int, end: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * (end - begin)).from_address(begin), dtype=torch.uint8)
