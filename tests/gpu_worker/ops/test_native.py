"""What happens where a GPU, or its driver, is too old for the kernels that were built."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_worker import ops
from gpu_worker.compat.vllm import ops as vllm_ops
from gpu_worker.ops import native
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.native_cuda import NativeCudaOps
from gpu_worker.ops.reference import ReferenceOps

GPU = torch.device("cuda", 1)
OLD = "device 1 has compute capability 7.5, which is too old: the kernels were built for 80,90a-real"


def kernels(*texts: str) -> SimpleNamespace:
    """An extension whose devices are `texts`: why each is too old."""
    why = dict(enumerate(texts))
    return SimpleNamespace(Swapper=object, device_count=lambda: len(why), unsupported=lambda i: why.get(i, ""))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets what `load_cuda` finds."""
    native.cuda_problem.cache_clear()
    yield lambda module: monkeypatch.setattr(native, "load_cuda", lambda: module)
    native.cuda_problem.cache_clear()


def test_a_device_that_is_too_old_is_named_and_gets_the_reference_ops(found, caplog):
    found(kernels("", OLD))
    with caplog.at_level(logging.WARNING):
        assert type(ops.choose_ops(GPU)) is type(ops.choose_ops(GPU)) is ReferenceOps
    assert [record.getMessage() for record in caplog.records if record.name == native.__name__] == [
        f"gpu_worker._C_cuda cannot be used: {OLD}"
    ]
    assert isinstance(ops.choose_ops(torch.device("cuda", 0)), NativeCudaOps)
    assert native.usable_cuda(1) is None and native.usable_cuda(0) is not None


@pytest.mark.parametrize("load", [native.load, native.load_cuda])
@pytest.mark.parametrize("built_in", [{}, {"bindings": "0123456789ab"}])
def test_a_module_of_other_bindings_is_refused_with_what_to_run(monkeypatch, load, built_in):
    for name in native.BINDINGS:
        stale = ModuleType(name)
        stale.__dict__.update(built_in, __file__=f"{name}.so")
        monkeypatch.setitem(sys.modules, name, stale)
    native._load.cache_clear()
    with pytest.raises(ImportError, match=r"^gpu_worker\._C_\w+\.so has other bindings than .*: run make extension$"):
        load()


def test_advice_fits_a_checkout_and_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert native.rebuild() == "run make extension"
    monkeypatch.setattr(native, "__file__", str(tmp_path / "gpu_worker/ops/native.py"))
    assert "make" not in native.rebuild() and "wheel" in native.rebuild()


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (None, "gpu_worker._C_cuda was not built: in a checkout, make cuda, where nvcc is"),
        (kernels(), "gpu_worker._C_cuda sees no GPU"),
        (kernels(OLD), f"gpu_worker._C_cuda cannot be used: {OLD}"),
    ],
)
def test_vllms_names_say_why_they_cannot_compute(found: Any, module: Any, text: str) -> None:
    found(module)
    vllm_ops.extension.cache_clear()
    with pytest.raises(ImportError) as raised:
        vllm_ops.extension()
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("best", "in_use", "name"),
    [
        ("avx512_bf16", "avx512_bf16", "native (avx512_bf16, 2 threads)"),
        ("amx", "avx512_bf16", "native (avx512_bf16; its AMX is wrong, 2 threads)"),
        ("avx512", "avx2", "native (avx2; avx512 was not built: run make extension, 2 threads)"),
    ],
)
def test_an_instruction_set_that_is_wrong_or_was_not_built_is_told_of(best: str, in_use: str, name: str) -> None:
    extension = ModuleType("_C_cpu")
    isas = [in_use, *([best] if best != "avx512" else [])]
    vars(extension).update(isa=lambda: in_use, best_isa=lambda: best, isas=lambda: isas, threads=lambda: 2)
    assert NativeCpuOps(extension).name == name


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize(
    "call",
    [
        lambda made, x, weight: made.rms_norm(x, weight[0], 1e-6),
        lambda made, x, weight: made.silu_and_mul(x),
        lambda made, x, weight: made.linear(x, weight),
        lambda made, x, weight: made.logits(x, weight),
    ],
)
def test_numbers_without_kernels_are_computed_by_the_reference(call):
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    given, expected = call(ops.choose_ops(torch.device("cpu")), x, weight), call(ReferenceOps(), x, weight)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)  # in float32 torch sums in an order of its own
