"""vLLM's ops on several devices, which are made up: each works where its tensors are, whichever is the current one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_worker.compat.vllm import ops as vllm_ops

MAPPING = torch.tensor([[0, 1]])


class OnDevice(torch.Tensor):
    """A CPU's tensor that says it is on a CUDA device."""

    place = torch.device("cuda", 0)
    is_cuda = property(lambda self: True)
    device = property(lambda self: self.place)

    def to(self, *_: Any, **__: Any) -> "OnDevice":
        return self


def on(device: int, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    tensor = torch.zeros(shape, dtype=dtype).as_subclass(OnDevice)
    tensor.place = torch.device("cuda", device)
    return tensor


class Devices:
    """The current device, and on which device the extension was called for what."""

    def __init__(self) -> None:
        self.current = 0
        self.calls: list[tuple[str, int, Any]] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def stream(self, device: torch.device) -> Any:
        return SimpleNamespace(cuda_stream=100 + device.index)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """An op of the extension, or a handle it makes."""

        def call(*arguments: Any, **_: Any) -> Any:
            streams = [x for x in arguments if isinstance(x, int) and 100 <= x < 200]
            self.calls.append((name, self.current, *streams))
            return self if name in ("Swapper", "KvCache", "Attention") else 0

        return call


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    devices = Devices()
    monkeypatch.setattr(vllm_ops, "extension", lambda: devices)
    monkeypatch.setattr(vllm_ops, "ref", lambda tensor: "ref")
    monkeypatch.setattr(torch.cuda, "device", devices.device)
    monkeypatch.setattr(torch.cuda, "current_stream", devices.stream)
    vllm_ops._swapper.cache_clear()
    yield devices
    vllm_ops._swapper.cache_clear()


def ops(device: int) -> dict[str, Callable[[], None]]:
    rows, flash = on(device, 2, 4, 32), on(device, 3, 8, 4, 32)
    packed, turned = on(device, 3, 4, 4, 8, 8), on(device, 3, 4, 32, 8)
    numbers = on(device, 2, dtype=torch.int32)
    common = rows, packed, turned, 4, 0.2, numbers, numbers, 8, 16
    pairs = MAPPING.as_subclass(OnDevice)
    return {
        "vllm_paged_attention": lambda: vllm_ops.paged_attention_v1(rows, *common),
        "cache_write": lambda: vllm_ops.reshape_and_cache_flash(rows, rows, flash, flash, numbers),
        "copy_blocks": lambda: vllm_ops.copy_blocks([flash], [flash], pairs),
        "convert_fp8": lambda: vllm_ops.convert_fp8(on(device, 3, dtype=torch.uint8), on(device, 3)),
        "let_wait": lambda: vllm_ops.swap_blocks(flash, flash, MAPPING),
    }


@pytest.mark.parametrize("op", ops(0))
def test_the_tensors_device_is_the_current_one(devices: Devices, op: str) -> None:
    for device in (1, 0, 2):
        devices.calls.clear()
        ops(device)[op]()
        assert devices.calls[-1] == (op, device, 100 + device)
        assert {call[1] for call in devices.calls} == {device} and devices.current == 0


@pytest.mark.parametrize(("out", "dtype"), [(False, torch.float16), (True, torch.float8_e4m3fn)])
def test_memory_that_is_not_pinned_is_copied_by_torch(devices: Devices, out: bool, dtype: torch.dtype) -> None:
    device, host = on(1, 4, 6, dtype=dtype), torch.zeros(4, 6, dtype=dtype)
    src, dst = (device, host) if out else (host, device)
    numbers = torch.arange(1.0, 13).repeat(2).view(4, 6)  # which e4m3 has exactly
    src.copy_(numbers.to(dtype))
    vllm_ops.swap_blocks(src, dst, torch.tensor([[0, 3], [2, 1]]).as_subclass(OnDevice))
    assert dst.float().tolist() == [[0] * 6, numbers[2].tolist(), [0] * 6, numbers[0].tolist()]
    half = torch.tensor([[2, 0]]).as_subclass(OnDevice)
    vllm_ops.swap_blocks(src, dst, src[0].nbytes // 2, half)
    assert dst[0].float().tolist() == [*numbers[1][:3].tolist(), 0, 0, 0]
    assert not devices.calls


def test_blocks_and_scales_must_be_what_the_caches_are(devices: Devices) -> None:
    cache = torch.zeros(4, 6)
    for name, size, caches in (
        ("src", 7, (cache, cache)),
        ("src", 0, (cache, cache)),
        ("dst", 24, (cache, cache[:, :3])),
    ):
        with pytest.raises(ValueError, match=f"^{name}: is not blocks of {size} bytes"):
            vllm_ops.swap_blocks(*caches, size, MAPPING)
    with pytest.raises(ValueError, match=r"^pairs: "):
        vllm_ops.swap_blocks(cache, cache, 24, torch.tensor([[0, 4]]))
    rows, flash = on(0, 2, 4, 32), on(0, 3, 8, 4, 32)
    for scale in (0, -1.0, float("nan"), float("inf")):
        for name, scales in (("k_scale", (scale, 1.0)), ("v_scale", (1.0, scale))):
            with pytest.raises(ValueError, match=f"^{name}: "):
                vllm_ops.reshape_and_cache_flash(rows, rows, flash, flash, on(0, 2), "fp8", *scales)
    assert not devices.calls
