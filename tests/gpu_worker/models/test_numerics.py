"""Runners of equal classes of numerics compute equal bits, and whatever changes bits changes the class."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gpu_worker.models import numerics
from gpu_worker.ops import native
from gpu_worker.ops.native_cuda import NativeCudaOps
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading

ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx")
TOKENS = [1 + i * 37 % 90 for i in range(40)]
OPTIONS = [
    {"quantization": quantization, "dtype": dtype}
    for quantization in ("auto", "none", "q8")
    for dtype in ("float32", "bfloat16")
]


@dataclass(frozen=True)
class Computed:
    """A runner's class, layout and fingerprint, and what it computed."""

    name: str
    served: tuple[str, str, str]
    bits: bytes


@pytest.fixture
def best_isa() -> Iterator[None]:
    """The instruction set is put back that the process used before."""
    extension = native.load()
    best = extension.isa() if extension else ""
    yield
    if extension:
        extension.select_isa(best)


@pytest.fixture
def computed(load, all_logits) -> Callable[..., Computed]:
    """Logits of a prompt in one piece and of a few decodes."""

    def run(model, name: str, **options) -> Computed:
        runner = load(model, **options)
        info, length = runner.info, len(TOKENS)
        logits = all_logits(runner, [*TOKENS, *TOKENS[:3]], range(length, length + 3))
        return Computed(name, (info.numerics, info.layout, info.fingerprint), logits.numpy().tobytes())

    return run


@pytest.mark.usefixtures("best_isa")
def test_equal_classes_compute_equal_bits(tiny, computed, monkeypatch) -> None:
    """Whichever instruction set, type and ops."""
    extension = native.load()
    if extension is None:
        pytest.skip("the extension was not built")
    found = []
    for options in OPTIONS:
        for isa, kv_cache_dtype in itertools.product(ISAS, ("float32", "float16", "bfloat16", "int8")):
            if isa in extension.isas():
                kv = {"kv_cache_dtype": kv_cache_dtype}
                name = f"{isa} {kv} {options}"
                found.append(computed(tiny("llama").directory, name, isa=isa, **kv, **options))
    monkeypatch.setattr(loading, "choose_ops", lambda *_: ReferenceOps())
    for dtype in ("float32", "bfloat16"):
        options = {"kv_cache_dtype": "float32", "dtype": dtype}
        found.append(computed(tiny("llama").directory, f"reference {dtype}", **options))
    for one, other in itertools.combinations(found, 2):
        assert one.served != other.served or one.bits == other.bits, (one.name, other.name, one.served[0])
    assert all(numerics and " " not in numerics for numerics, _, _ in (each.served for each in found))


@pytest.mark.usefixtures("best_isa")
@pytest.mark.parametrize(
    ("isa", "kv_cache_dtype", "quantization", "is_one"),
    [
        ("avx512", "bfloat16", "none", True),
        ("avx512_bf16", "float32", "q8", True),
        ("avx512_bf16", "float16", "q8", True),
        ("avx512_bf16", "bfloat16", "q8", False),  # keys are multiplied in bfloat16
        ("avx512_bf16", "float32", "none", False),  # and here weights
        ("generic", "float32", "q8", False),
    ],
)
def test_wider_registers_make_no_class(tiny, computed, isa, kv_cache_dtype, quantization, is_one) -> None:
    """A machine with AVX-512 goes on with the streams of one with AVX2 where both compute in float32."""
    extension = native.load()
    if extension is None or not {isa, "avx2"} <= set(extension.isas()):
        pytest.skip(f"this machine or build has no {isa} beside avx2")
    options = {"kv_cache_dtype": kv_cache_dtype, "quantization": quantization, "dtype": "bfloat16"}
    one, other = (computed(tiny("llama").directory, name, isa=name, **options) for name in ("avx2", isa))
    assert (one.served == other.served, one.bits == other.bits) == (is_one, is_one)


def test_batch_invariance_on_a_gpu_is_a_class_of_its_own(monkeypatch) -> None:
    """Its products are other kernels' than those of other workers, and than those it had before."""
    monkeypatch.setattr(numerics, "_gpu", lambda device: ("Some GPU", "sm90"))
    device = torch.device("cuda")
    ops, decoder = NativeCudaOps(ModuleType("none"), device), SimpleNamespace()
    plain, invariant = (
        numerics.class_of(ops, decoder, torch.bfloat16, torch.bfloat16, device, each) for each in (False, True)
    )
    assert invariant == f"{plain}/batch-invariant-2" and "Some-GPU" in plain
