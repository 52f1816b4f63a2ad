"""How peers.py calls others' wheels, on stand-ins that compute attention as those wheels are documented to."""

import sys
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of tests/gpu, which are scripts beside this file."""
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    before = set(sys.modules)
    import decode
    import peers
    import target

    found = SimpleNamespace(decode=decode, peers=peers, target=target)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and "/tests/gpu/" in str(sys.modules[name].__file__):
            monkeypatch.delitem(sys.modules, name)
    return found


def attended(queries: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor, scale: float) -> Tensor:
    """queries [sequences, heads, dim]; keys, values [pages, page, kv_head, dim]."""
    out = torch.zeros_like(queries)
    group = queries.shape[1] // keys.shape[2]
    for row, length in enumerate(lens.tolist()):
        pages = tables[row, : -(-length // keys.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in (keys, values))
        weights = torch.softmax(torch.einsum("hd,nhd->hn", queries[row].float(), k) * scale, -1)
        out[row] = torch.einsum("hn,nhd->hd", weights, v).to(out.dtype)
    return out


class FlashAttention2:
    def flash_attn_with_kvcache(
        self, q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, **options: Any
    ) -> Tensor:
        assert k.shape[1] % 256 == 0 and q.shape[1] == 1 and options.keys() == {"causal", "softmax_scale"}
        return attended(q[:, 0], k, v, block_table, cache_seqlens, options["softmax_scale"]).unsqueeze(1)


class FlashAttention3:
    def flash_attn_with_kvcache(self, *given: Tensor, cache_seqlens: Tensor, page_table: Tensor, **options: Any) -> Any:
        assert given[1].shape[1] == 16
        q, k, v = given
        return attended(q[:, 0], k, v, page_table, cache_seqlens, options["softmax_scale"]).unsqueeze(1), None


class Vllm:
    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, **options: Any) -> Tensor:
        assert options["cu_seqlens_q"].tolist() == list(range(len(q) + 1)) and options["fa_version"] == 2
        lens = options["seqused_k"]
        assert options["max_seqlen_k"] == int(lens.max()) and options["causal"] and options["max_seqlen_q"] == 1
        return out.copy_(attended(q, k, v, options["block_table"], lens, options["softmax_scale"]))


class FlashInfer:
    """BatchDecodeWithPagedKVCacheWrapper, with pages [kv_head, page, dim] in a list for each sequence."""

    def BatchDecodeWithPagedKVCacheWrapper(self, _: Tensor, layout: str, use_tensor_cores: bool) -> Any:
        assert layout == "HND" and use_tensor_cores
        planned: list[Any] = []

        def run(queries: Tensor, kv: Tensor) -> Tensor:
            starts, indices, last, heads, kv_heads, dim, page = planned
            assert queries.shape[1:] == (heads, dim) and kv.shape[1:] == (2, kv_heads, page, dim)
            counts = starts.diff()
            tables = torch.nn.utils.rnn.pad_sequence(list(indices.split(counts.tolist())), batch_first=True)
            keys, values = (kv[:, side].transpose(1, 2) for side in range(2))
            return attended(queries, keys, values, tables, (counts - 1) * page + last, dim**-0.5)

        return SimpleNamespace(plan=lambda *given, q_data_type: planned.extend(given), run=run)


WHEELS = {
    "flashinfer": ("FlashInfer", FlashInfer),
    "flash_attn": ("FlashAttention", FlashAttention2),
    "flash_attn_interface": ("FlashAttention", FlashAttention3),
    "vllm.vllm_flash_attn": ("vLLM", Vllm),
}


def measured(modules: SimpleNamespace, spoil: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[Any, dict[str, str]]:
    torch.manual_seed(1)
    t = modules.target.Target(torch.device("cpu"), None, True, None, Namespace())
    shape = modules.decode.Shape(batch=3, context=300, heads=8, kv_heads=2, head_dim=64, skewed=True)
    scratch: dict[Any, Any] = {}
    some = [modules.decode.inputs(t, shape, scratch) for _ in range(2)]

    def ours(number: int) -> Tensor:
        x = some[number]
        sides = [x.kv[:, :, side].transpose(1, 2) for side in range(2)]
        return spoil(attended(x.queries, *sides, x.batch.block_tables, x.batch.seq_lens, shape.scale))

    calls, reasons = modules.peers.peer_calls(t, shape, some, ours)
    for call in calls.values():
        torch.testing.assert_close(call(1).float(), ours(1).float(), rtol=2e-2, atol=2e-2)
    return calls, reasons


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_wheel_that_is_here_is_called_on_our_numbers(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, wheel: str
) -> None:
    name, stand_in = WHEELS[wheel]
    monkeypatch.setitem(sys.modules, wheel, stand_in())
    monkeypatch.setitem(sys.modules, wheel.partition(".")[0], sys.modules.get(wheel.partition(".")[0]) or stand_in())
    calls, reasons = measured(modules)
    assert list(calls) == [name]
    assert reasons.keys() == {"FlashInfer", "FlashAttention", "vLLM"} - {name}
    assert all(text.startswith("ModuleNotFoundError: ") for text in reasons.values()), reasons


def test_a_wheel_that_computes_something_else_is_not_measured(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttention2())
    calls, reasons = measured(modules, spoil=lambda x: -x)
    assert not calls
    assert reasons["FlashAttention"].startswith("NotMeasured: differs from ours by 2.0e+00")


def test_a_wheel_that_fails_is_not_measured(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    calls, reasons = measured(modules)
    assert not calls
    assert reasons["FlashAttention"].startswith("AttributeError: ")
