"""Decode attention of FlashInfer, FlashAttention and vLLM, on the same numbers as ours: of their own wheels, where they
can be imported. What cannot is said to be not measured, and why. Nothing of ours is measured under their names."""

import importlib.metadata
import math
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from bandwidth import copy_bandwidth
from target import Target, target
from timing import Call, medians
from torch import Tensor

if TYPE_CHECKING:
    from decode import Inputs, Shape

TOLERANCE = 2e-2  # of the norm: bfloat16 on both sides
LARGE_PAGE = 256  # keys: FlashAttention 2 takes no smaller pages
Peer = Callable[[Target, "Shape", "list[Inputs]"], Call]


class NotMeasured(Exception):
    """Why a peer has no figure."""


def flashinfer(t: Target, shape: "Shape", some: "list[Inputs]") -> Call:
    """FlashInfer with tensor cores, planned before the clock starts, as ours is."""
    library = import_module("flashinfer")
    block = some[0].kv.shape[3]
    counts = torch.tensor([-(-n // block) for n in shape.lens], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    last = torch.tensor([(n - 1) % block + 1 for n in shape.lens], dtype=torch.int32)
    wrappers = []
    for x in some:
        indices = torch.cat([row[:n] for row, n in zip(x.batch.block_tables, counts.tolist(), strict=True)])
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=t.device)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        sizes = shape.heads, shape.kv_heads, shape.head_dim, block
        wrapper.plan(starts.to(t.device), indices, last.to(t.device), *sizes, q_data_type=torch.bfloat16)
        wrappers.append((wrapper, x.kv.transpose(1, 2).contiguous()))  # [blocks, 2, kv_head, block, dim]
    return lambda number: wrappers[number][0].run(some[number].queries, wrappers[number][1])


def flash_attention(t: Target, shape: "Shape", some: "list[Inputs]") -> Call:
    """FlashAttention 3 on our pages, where it is installed; else FlashAttention 2 on pages of 256 keys."""
    try:
        library, name, page = import_module("flash_attn_interface"), "page_table", some[0].kv.shape[3]
    except ImportError:
        library, name, page = import_module("flash_attn"), "block_table", LARGE_PAGE
    caches = [by_token(x, shape, page) for x in some]

    def call(number: int) -> Any:
        keys, values, tables = caches[number]
        x = some[number]
        given = {"cache_seqlens": x.batch.seq_lens, name: tables, "causal": True, "softmax_scale": shape.scale}
        out = library.flash_attn_with_kvcache(x.queries.unsqueeze(1), keys, values, **given)
        return (out[0] if isinstance(out, tuple) else out).squeeze(1)

    return call


def vllm(t: Target, shape: "Shape", some: "list[Inputs]") -> Call:
    """What vLLM runs by default on these devices: its build of FlashAttention, on pages of our size."""
    library = import_module("vllm.vllm_flash_attn")
    version = 3 if t.device.type == "cuda" and torch.cuda.get_device_capability(t.device)[0] == 9 else 2
    caches = [by_token(x, shape, x.kv.shape[3]) for x in some]
    out = torch.empty_like(some[0].queries)

    def call(number: int) -> Any:
        keys, values, tables = caches[number]
        x = some[number]
        return library.flash_attn_varlen_func(
            *(x.queries, keys, values),
            max_seqlen_q=1,
            cu_seqlens_q=x.batch.cu_q,
            max_seqlen_k=max(shape.lens),
            seqused_k=x.batch.seq_lens,
            softmax_scale=shape.scale,
            causal=True,
            block_table=tables,
            out=out,
            fa_version=version,
        )

    return call


PEERS: dict[str, tuple[str, Peer]] = {  # the distributions that a version is looked up in, and how it is called
    "FlashInfer": ("flashinfer-python", flashinfer),
    "FlashAttention": ("flash-attn", flash_attention),
    "vLLM": ("vllm", vllm),
}


def by_token(x: "Inputs", shape: "Shape", page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [pages, page, kv_head, dim], and tables of pages: ours, or new ones of another size."""
    keys, values = (x.kv[:, :, side].transpose(1, 2).contiguous() for side in range(2))
    tables = x.batch.block_tables
    if page == keys.shape[1]:
        return keys, values, tables
    counts = [-(-n // page) for n in shape.lens]
    order = torch.randperm(sum(counts), device=keys.device).to(torch.int32)
    wide = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=keys.device)
    made = [keys.new_zeros(sum(counts), page, *keys.shape[2:]) for _ in range(2)]
    done = 0
    for row, (count, length) in enumerate(zip(counts, shape.lens, strict=True)):
        wide[row, :count] = order[done : done + count]
        blocks = tables[row, : -(-length // keys.shape[1])].long()
        for side, target_ in zip((keys, values), made, strict=True):
            dense = side[blocks].flatten(0, 1)[: count * page]
            padded = torch.nn.functional.pad(dense, (0, 0, 0, 0, 0, count * page - len(dense)))
            target_[wide[row, :count].long()] = padded.unflatten(0, (count, page))
        done += count
    return made[0], made[1], wide


def peer_calls(
    t: Target, shape: "Shape", some: "list[Inputs]", ours: Callable[[int], Tensor]
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of those peers that are here and agree with ours, and why the others are not measured."""
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for name, (_, prepare) in PEERS.items():
        try:
            call = prepare(t, shape, some)
            got, want = call(0), ours(0)
            error = float((got.float() - want.float()).norm() / want.float().norm())  # type: ignore[attr-defined]
            if not error < TOLERANCE:
                raise NotMeasured(f"differs from ours by {error:.1e}")
            calls[name] = call
        except Exception as error:  # of somebody else's code: no reason to fail our stage
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return calls, reasons


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    from decode import Shape, inputs, our_call  # which reads the command line's target, too

    t = target()
    torch.manual_seed(0)
    copy = copy_bandwidth(t)
    grid = [Shape(batch=b, context=c) for c in (1024, 8192, 32768) for b in (1, 8, 64)]
    reasons: dict[str, str] = {}
    ratios: dict[str, list[float]] = {name: [] for name in PEERS}
    rows = []
    for shape in t.pick(grid, [Shape(batch=2, context=40, head_dim=64)]):
        scratch: dict[Any, Any] = {}
        some = [inputs(t, shape, scratch) for _ in range(t.pick(shape.num_sets, 2))]
        ours = our_call(t, shape, some)
        calls, missing = peer_calls(t, shape, some, ours)
        reasons |= missing
        times = medians(t, {"ours": ours} | calls, len(some), 9)
        cells = []
        for name in PEERS:
            cells.append(f"{times[name] / times['ours']:.2f}×" if name in times else "not measured")
            ratios[name] += [times[name] / times["ours"]] if name in times else []
        share = shape.num_bytes / times["ours"] / copy
        rows.append((shape.name, f"{times['ours'] * 1e6:.1f}", f"{share:.0%}", *cells))
    head = ("heads/kv/dim, batch × context", "µs", "of copy", *PEERS)
    t.table("Decode attention beside others' wheels: how many times as long they take", head, rows)
    t.say()
    for name, (distribution, _) in PEERS.items():
        of = f"- {name} ({version(distribution)})"
        if ratios[name]:
            mean = math.prod(ratios[name]) ** (1 / len(ratios[name]))
            t.say(f"{of}: {mean:.2f}× in the geometric mean of {len(ratios[name])} shapes")
        if name in reasons:
            t.say(f"{of}: not measured{' for some shapes' if ratios[name] else ''}: {reasons[name]}")
    t.finish()


if __name__ == "__main__":
    main()
