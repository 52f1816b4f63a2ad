"""Puts a runner together: device, model, memory for blocks."""

import logging
import os
from pathlib import Path

import torch

from gpu_worker.kv_arena import KvArena, KvShape
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.loader import LoadedModel, Progress, load_model
from gpu_worker.ops import Ops, choose_ops, make_batch
from gpu_worker.plan import RunnerInfo
from gpu_worker.sampler import Sampler
from octavo.errors import InvalidArgument

log = logging.getLogger(__name__)

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_KV_BYTES = 1 << 30  # unless said otherwise, at most this and a quarter of what is free
GPU_MEMORY_SHARE = 0.9
GPU_SWAP_BYTES = 4 << 30


def load_runner(
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    block_size: int = 16,
    kv_cache_bytes: int | None = None,
    swap_bytes: int | None = None,
    max_batch_tokens: int = 2048,
    max_batch_sequences: int = 64,
    context_tokens: int | None = None,
    cache_dir: Path | str | None = None,
    threads: int | None = None,
    name: str | None = None,
    poison: bool = False,
    on_progress: Progress | None = None,
) -> ModelRunner:
    """A runner for `model` (`smollm2`, a .gguf file, a directory, owner/name on the hub) with its blocks allocated.

    `device` is cpu, cuda, cuda:N or auto. `kv_cache_bytes` None: what is left on a GPU after the largest step, up to 1
    GiB on a CPU. `cache_dir` None: ~/.cache/octavo. `name` is what requests call the model. `poison`: see ModelRunner.
    """
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", f"{dtype!r} is not one of {', '.join(DTYPES)}")
    if not 8 <= block_size <= 128 or block_size & (block_size - 1):
        raise InvalidArgument("block_size", f"{block_size} is not a power of two from 8 to 128")
    if threads:
        torch.set_num_threads(threads)
    where = choose_device(device)
    ops = choose_ops(where)
    cache = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "octavo"
    loaded = load_model(model, device=where, dtype=DTYPES[dtype], ops=ops, cache_dir=cache, on_progress=on_progress)
    decoder = loaded.decoder
    shape = KvShape(
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        block_size=block_size,
        head_dim=decoder.head_dim,
        dtype=loaded.dtype,
    )
    if kv_cache_bytes is None:
        kv_cache_bytes = _free_bytes(where, decoder, shape, max_batch_tokens, max_batch_sequences)
    num_blocks = kv_cache_bytes // shape.bytes_per_block
    if num_blocks < 1:
        raise InvalidArgument(
            "kv_cache_bytes", f"{kv_cache_bytes} do not hold a block of {shape.bytes_per_block} bytes"
        )
    if swap_bytes is None:
        swap_bytes = kv_cache_bytes // 2 if where.type == "cpu" else min(GPU_SWAP_BYTES, _host_bytes() // 4)
    arena = KvArena(shape, num_blocks, swap_bytes // shape.bytes_per_block, where, ops)
    context = min(decoder.context_tokens, context_tokens or decoder.context_tokens, num_blocks * block_size)
    info = _info(loaded, arena, where, context, name)
    _log_start(info, ops, decoder)
    sampler = Sampler(decoder.vocab_size, where, loaded.eos_token_ids)
    return ModelRunner(info, decoder, arena, sampler, where, poison=poison)


def choose_device(name: str) -> torch.device:
    """The device; `auto` takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument("device", f"{name!r} is not a device") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument("device", f"{name!r}: only cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device", f"{name!r}: no CUDA device is usable here; try --device cpu")
    return device


def _info(loaded: LoadedModel, arena: KvArena, device: torch.device, context: int, name: str | None) -> RunnerInfo:
    return RunnerInfo(
        model=name or loaded.name,
        fingerprint=loaded.fingerprint,
        layout=arena.shape.layout,
        kv_dtype=arena.shape.dtype_name,
        device=str(device),
        vocab_size=loaded.decoder.vocab_size,
        context_tokens=context,
        eos_token_ids=loaded.eos_token_ids,
        block_size=arena.shape.block_size,
        num_blocks=arena.num_blocks,
        num_host_blocks=arena.num_host_blocks,
        bytes_per_block=arena.shape.bytes_per_block,
        tokenizer=loaded.tokenizer,
    )


def _log_start(info: RunnerInfo, ops: Ops, decoder: Decoder) -> None:
    log.info(
        "%s on %s: decoder %s, %s ops, %d blocks of %d tokens (%.2f GiB, %s), %d host blocks",
        *(info.model, info.device, decoder.name, ops.name, info.num_blocks, info.block_size),
        *(info.num_blocks * info.bytes_per_block / 2**30, info.layout, info.num_host_blocks),
    )


def _host_bytes() -> int:
    """Memory of this machine that nobody uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_bytes(
    device: torch.device, decoder: Decoder, shape: KvShape, max_batch_tokens: int, max_batch_sequences: int
) -> int:
    """What blocks may take: on a GPU its share less weights and the largest step, measured by running it."""
    if device.type == "cpu":
        return max(shape.bytes_per_block, min(CPU_KV_BYTES, _host_bytes() // 4))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _run_largest_step(device, decoder, shape, max_batch_tokens, max_batch_sequences)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - GPU_MEMORY_SHARE) * total - activations)


@torch.inference_mode()
def _run_largest_step(
    device: torch.device, decoder: Decoder, shape: KvShape, max_batch_tokens: int, max_batch_sequences: int
) -> None:
    """One sequence with most of the budget, the others with one token each, and logits for all of them."""
    others = min(max_batch_sequences, max_batch_tokens) - 1
    lengths = [1] * others + [min(max_batch_tokens - others, decoder.context_tokens)]
    num_tokens = sum(lengths)
    positions = [position for length in lengths for position in range(length)]
    tables = [[0] * (-(-length // shape.block_size)) for length in lengths]
    batch = make_batch([0] * num_tokens, positions, [-1] * num_tokens, lengths, lengths, tables, device)
    rows = torch.arange(num_tokens - len(lengths), num_tokens, device=device)
    decoder.logits(decoder.forward(batch, list(shape.arena(1, device).unbind(0)), rows)).float()
