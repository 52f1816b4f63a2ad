"""What the CUDA ops do without a kernel: their extension here has none, so a call that needs one fails."""

import logging
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gpu_worker.ops import AttentionOptions, TokenBatch, kv_format, make_batch
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.native_cuda import NativeCudaOps, ref
from gpu_worker.running.graphs import capture_graphs

torch.set_num_threads(1)
CPU = torch.device("cpu")
HEADS, DIM, SIZE, TOKENS = 2, 16, 8, 11


@pytest.fixture
def ops() -> NativeCudaOps:
    return NativeCudaOps(ModuleType("no_kernels"), CPU)


def layer(dtype: torch.dtype) -> torch.Tensor:
    shape = KvShape(num_layers=1, num_kv_heads=HEADS, block_size=SIZE, head_dim=DIM, dtype=dtype)
    return shape.allocate_arena(4, CPU)[0]


def prompt() -> TokenBatch:
    """TOKENS tokens in blocks 3 and 1."""
    slots = [(3, 1)[p // SIZE] * SIZE + p % SIZE for p in range(TOKENS)]
    return make_batch([0] * TOKENS, list(range(TOKENS)), slots, [TOKENS], [TOKENS], [[3, 1]], CPU)


def test_no_graphs_of_layers_that_the_kernels_do_not_know(ops, caplog):
    def capture(step: object) -> object:
        raise AssertionError("captured")

    caplog.set_level(logging.INFO)
    decoder = SimpleNamespace(name="any", capturable=True)
    assert capture_graphs(decoder, [layer(torch.float64)], ops, 2, 32, CPU, capture) == []
    assert "cannot be captured together, with a cache of torch.float64" in caplog.text
    for dtype in kv_format.NAMES:
        assert ops.captures(layer(dtype))


def test_a_type_that_no_op_takes_is_named():
    with pytest.raises(TypeError, match=r"no CUDA op takes a tensor of torch\.float64"):
        ref(torch.zeros(2, dtype=torch.float64))


def test_what_a_kernel_found_wrong_is_raised_once_by_the_arguments_name():
    class Refused(ValueError):
        pass

    told = [None, "block_tables: named a block that is not there", None]
    extension = ModuleType("told")
    extension.take_fault, extension.ArgumentError = lambda: told.pop(0), Refused
    ops = NativeCudaOps(extension, CPU)
    ops.raise_faults()
    with pytest.raises(Refused, match=r"^block_tables: "):
        ops.refill(prompt())
    ops.refill(prompt())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("q_lens", [TOKENS - 1], "q_lens: are those of 10 queries"),
        ("q_lens", [TOKENS, 0], "q_lens: are not as many"),
        ("kv_lens", [17], "kv_lens: block_tables have room for 16 keys"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(field, value, said):
    extension = ModuleType("quiet")
    extension.take_fault = lambda: None
    extension.Attention = extension.KvCache = lambda *args: None
    batch = prompt()
    setattr(batch, field, value)
    queries = torch.zeros(TOKENS, 2 * HEADS, DIM)
    with pytest.raises(ValueError, match=f"^{said}"):
        NativeCudaOps(extension, CPU).paged_attention(queries, layer(torch.float32), batch, AttentionOptions(scale=1.0))
