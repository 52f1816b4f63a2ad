"""What the CUDA ops do without a kernel: their extension here has none, so whatever asks for one fails."""

import logging
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gpu_worker.graphs import capture_decodes
from gpu_worker.kv_arena import KvShape
from gpu_worker.ops import AttentionOptions, Batch, kv_format, make_batch
from gpu_worker.ops.kv_layer import KvLayer
from gpu_worker.ops.native_cuda import NativeCudaOps, ref
from gpu_worker.ops.reference import ReferenceOps

torch.set_num_threads(1)
CPU = torch.device("cpu")
HEADS, DIM, SIZE, TOKENS = 2, 16, 8, 11


@pytest.fixture
def ops() -> NativeCudaOps:
    return NativeCudaOps(ModuleType("no_kernels"), CPU)


def layer(dtype: torch.dtype) -> torch.Tensor:
    shape = KvShape(num_layers=1, num_kv_heads=HEADS, block_size=SIZE, head_dim=DIM, dtype=dtype)
    return shape.arena(4, CPU)[0]


def prompt() -> Batch:
    """TOKENS tokens in blocks 3 and 1."""
    slots = [(3, 1)[p // SIZE] * SIZE + p % SIZE for p in range(TOKENS)]
    return make_batch([0] * TOKENS, list(range(TOKENS)), slots, [TOKENS], [TOKENS], [[3, 1]], CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_with_a_scale_per_slot_is_the_reference_ops(ops, dtype):
    torch.manual_seed(0)
    keys, values, queries = (torch.randn(TOKENS, heads, DIM).to(dtype) for heads in (HEADS, HEADS, 2 * HEADS))
    cos, sin = torch.rand(2, TOKENS, DIM // 2).repeat(1, 1, 2)
    options = AttentionOptions(scale=0.25)
    got, want = [], []
    for each, results in ((ops, got), (ReferenceOps(), want)):
        for turned in (False, True):
            kv, batch = layer(torch.int8), prompt()
            if turned:
                results.append(each.rotary_cache_write(kv, queries, keys, values, cos.to(dtype), sin.to(dtype), batch))
            else:
                each.cache_write(kv, keys, values, batch)
            results += [kv, each.paged_attention(queries, kv, batch, options)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert want[0].any() and want[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_other_types_go_to_the_kernels(ops, dtype):
    keys, values = torch.randn(2, TOKENS, HEADS, DIM)
    with pytest.raises(AttributeError, match="has no attribute"):
        ops.cache_write(layer(dtype), keys, values, prompt())


def test_int8_with_scales_of_a_layer_goes_to_the_kernels(ops):
    keys, values = torch.randn(2, TOKENS, HEADS, DIM)
    pages = torch.zeros(4, HEADS, 2, SIZE, DIM, dtype=torch.int8)
    with pytest.raises(AttributeError, match="has no attribute"):
        ops.cache_write(KvLayer.of(pages, torch.ones(1), torch.ones(1)), keys, values, prompt())


def test_no_graphs_of_layers_that_the_kernels_do_not_know(ops, caplog):
    def capture(step: object) -> object:
        raise AssertionError("captured")

    caplog.set_level(logging.INFO)
    decoder = SimpleNamespace(name="any", capturable=True)
    assert capture_decodes(decoder, [layer(torch.int8)], ops, 2, 32, CPU, capture) is None
    assert "cannot be captured together, with a cache of torch.int8" in caplog.text
    for dtype in set(kv_format.NAMES) - {torch.int8}:
        assert ops.captures(layer(dtype))


def test_a_type_that_no_op_takes_is_named():
    with pytest.raises(TypeError, match=r"no CUDA op takes a tensor of torch\.float64"):
        ref(torch.zeros(2, dtype=torch.float64))
