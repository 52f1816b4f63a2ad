"""Runners of equal classes of numerics compute equal bits, and whatever changes bits changes the class."""

import itertools
from types import ModuleType, SimpleNamespace

import pytest
import torch
from effort import draws

from gpu_worker.models import numerics
from gpu_worker.models.through_transformers.pictures.decoder import PictureDecoder
from gpu_worker.ops import native
from gpu_worker.ops.native_cuda import NativeCudaOps
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading

ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx")
TOKENS = [1 + i * 37 % 90 for i in range(40)]
KV_TYPES = ("float32", "float16", "bfloat16", "int8")
FORMS = [  # (quantization, dtype, kv_cache_dtype)
    *(("none", "bfloat16", kv) for kv in ("float32", "bfloat16")),
    *(("q8", "bfloat16", kv) for kv in ("float32", "float16", "bfloat16")),
    *(("auto", "float32", "int8"), ("q8", "float32", "float32")),
]
EVERY_FORM = [*itertools.product(("auto", "none", "q8"), ("float32", "bfloat16"), KV_TYPES)]
SAME_AS_AVX2 = {  # a machine with AVX-512 goes on with the streams of one with AVX2 where both compute in float32
    ("avx512", "none", "bfloat16", "bfloat16"): True,
    ("avx512_bf16", "q8", "bfloat16", "float32"): True,
    ("avx512_bf16", "q8", "bfloat16", "float16"): True,
    ("avx512_bf16", "q8", "bfloat16", "bfloat16"): False,  # keys are multiplied in bfloat16
    ("avx512_bf16", "none", "bfloat16", "float32"): False,  # and here weights
    ("generic", "q8", "bfloat16", "float32"): False,
}


@pytest.mark.scaled
@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize("isa", ["generic"], indirect=True)
def test_equal_classes_compute_equal_bits(isa, tiny, load, all_logits, monkeypatch) -> None:
    """Whichever instruction set, type and ops: of a prompt in one piece and of a few decodes."""

    def compute(**options):
        runner, length = load(tiny("llama").directory, **options), len(TOKENS)
        info = runner.info
        logits = all_logits(runner, [*TOKENS, *TOKENS[:3]], range(length, length + 3))
        return (info.numerics, info.layout, info.fingerprint), logits.numpy().tobytes()

    found = {
        (isa, *form): compute(isa=isa, **dict(zip(("quantization", "dtype", "kv_cache_dtype"), form, strict=True)))
        for form in (FORMS, EVERY_FORM)[draws(0, 1)]
        for isa in ISAS
        if isa in native.load().isas()
    }
    for (isa, *form), is_one in SAME_AS_AVX2.items():
        if {(isa, *form), ("avx2", *form)} <= found.keys():
            one, other = found[isa, *form], found["avx2", *form]
            assert (one[0] == other[0], one[1] == other[1]) == (is_one, is_one), (isa, form)
    monkeypatch.setattr(loading, "choose_ops", lambda *_: ReferenceOps())
    for dtype in ("float32", "bfloat16"):
        found["reference", dtype] = compute(kv_cache_dtype="float32", dtype=dtype)
    for (one, (served, bits)), (other, (other_served, other_bits)) in itertools.combinations(found.items(), 2):
        assert served != other_served or bits == other_bits, (one, other, served)
    assert all(served[0] and " " not in served[0] for served, _ in found.values())


def test_batch_invariance_on_a_gpu_is_a_class_of_its_own(monkeypatch) -> None:
    """Its products are other kernels' than those of other workers, and than those it had before."""
    monkeypatch.setattr(numerics, "_gpu", lambda device: ("Some GPU", "sm90"))
    device = torch.device("cuda")
    ops, decoder = NativeCudaOps(ModuleType("none"), device), SimpleNamespace()
    plain, invariant = (
        numerics.class_of(ops, decoder, torch.bfloat16, torch.bfloat16, device, each) for each in (False, True)
    )
    assert invariant == f"{plain}/batch-invariant-2" and "Some-GPU" in plain


def test_a_class_names_the_ranks_with_a_device_each_unless_rows_are_summed_in_one_order() -> None:
    def class_of(ops: ReferenceOps, ranks: int, batch_invariant: bool = False) -> str:
        cpu, decoder = torch.device("cpu"), SimpleNamespace()
        return numerics.class_of(ops, decoder, torch.float32, torch.float32, cpu, batch_invariant, ranks)

    alone = class_of(ReferenceOps(), 1)
    assert len({alone, class_of(ReferenceOps(), 2), class_of(ReferenceOps(), 3)}) == 3
    assert class_of(ReferenceOps(), 2, batch_invariant=True) == alone


def test_a_class_names_the_products_of_models_with_pictures() -> None:
    """Workers from before the ops made them computed other bits."""
    cpu, decoder = torch.device("cpu"), object.__new__(PictureDecoder)
    found = numerics.class_of(ReferenceOps(), decoder, torch.float32, torch.float32, cpu, False)
    assert "/picture/float32/" in found and "/by-ops/" in found
