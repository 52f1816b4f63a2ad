"""Loads a model and allocates its blocks: everything a ModelRunner needs before its first step."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import ProgressCallback
from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.decoders.ranks.device_team import DeviceTeam
from gpu_worker.models.decoders.ranks.place import RankPlace
from gpu_worker.models.loader import load_model
from gpu_worker.models.loading.loaded_model import LoadedModel
from gpu_worker.models.numerics import class_of
from gpu_worker.models.packed.packed_cache import PackedCache
from gpu_worker.ops import Ops, choose_ops, kv_format, native, rehearsal_ops
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running.graphs import CudaGraphCapturer, StepGraphs, capture_graphs
from gpu_worker.running.memory.arena import KvArena
from gpu_worker.running.memory.rank_arena import RankArena
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.running.rank_sizing import RehearsedMemory, agreed_blocks, rank_block_bytes
from gpu_worker.running.sizing import (
    CudaMemory,
    choose_device,
    cpu_block_bytes,
    gpu_block_bytes,
    host_pool_bytes,
    worst_steps,
)
from gpu_worker.sampling.native_sampler import choose_sampler
from gpu_worker.steps.runner import ADAPTER_BYTES, RunnerInfo
from gpu_worker.steps.step_input import StepInput
from octavo.process.machine import available_bytes
from octavo.request.errors import InvalidArgument

log = logging.getLogger(__name__)

LARGEST_BLOCK, LARGEST_WITH_STATE = 128, 1024  # token slots; of a model whose blocks have a state
ADAPTER_SHARE = 64  # of the blocks of a GPU, what adapters may take by default
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_runner(
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    quantization: str = "auto",
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    kv_cache_bytes: int | None = None,
    swap_bytes: int | None = None,
    adapter_bytes: int | None = None,
    max_batch_tokens: int = 2048,
    max_batch_sequences: int = 64,
    gpu_memory_utilization: float = 0.9,
    cuda_graphs: str = "auto",
    batch_invariant: bool = False,
    context_tokens: int | None = None,
    cache_dir: Path | str | None = None,
    packed_cache: Path | str = "auto",
    packed_cache_bytes: int = 16 << 30,
    threads: int | None = None,
    isa: str = "auto",
    generation_config: str = "auto",
    name: str | None = None,
    place: RankPlace | None = None,
    on_progress: ProgressCallback | None = None,
) -> ModelRunner:
    """A runner for `model`, with its blocks allocated.

    `model` is `smollm2`, a .gguf file, a directory, or owner/name on the hub; `name` is what requests call it.
    `device` is cpu, cuda, cuda:N or auto. `kv_cache_bytes` None means what the largest step leaves of the share
    `gpu_memory_utilization` of a GPU's memory, and up to 1 GiB on a CPU. `swap_bytes` None means a tenth of the
    available host memory, up to 4 GiB. `adapter_bytes` is what a GPU's blocks leave free for low-rank adapters;
    None: `adapter_share`.
    `kv_cache_dtype` is auto (the model's) or one of kv_format.DTYPES.
    models/packed/packing.py explains `quantization`. `cuda_graphs` is auto (steps of decodes and other steps
    of few tokens, where device, ops and decoder allow it), decodes (those alone) or off.
    `isa` is auto (the best that the machine has) or the instruction set of native ops on a CPU, for the whole process.
    `batch_invariant` demands that the bits of a sequence do not depend on the batch (InvalidArgument where they would).
    `cache_dir` None means ~/.cache/octavo. `packed_cache` is a folder of weights packed for a CPU, of at most
    `packed_cache_bytes`; auto: `packed` in `cache_dir`; off: none. `generation_config` is auto or off: may the
    model recommend sampling parameters? `place` is that of a rank in a group, whose
    blocks lie in memory of all ranks, or on its device.
    """
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", f"{dtype!r} is not one of {', '.join(DTYPES)}")
    if kv_cache_dtype != "auto" and kv_cache_dtype not in kv_format.DTYPES:
        raise InvalidArgument("kv_cache_dtype", f"{kv_cache_dtype!r} is not one of auto, {', '.join(kv_format.DTYPES)}")
    if not 8 <= block_size <= LARGEST_WITH_STATE or block_size & (block_size - 1):
        raise InvalidArgument("block_size", f"{block_size} is not a power of two from 8 to {LARGEST_WITH_STATE}")
    where = choose_device(place.device if place is not None and place.has_device else device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if isa != "auto":
        native.pin_isa(isa, where)
    if place is not None and place.rehearsal:
        ops = rehearsal_ops(place.rehearsal, threads or 0, batch_invariant)
    else:
        ops = choose_ops(where, threads or 0, batch_invariant)
    cache = Path(cache_dir) if cache_dir else default_cache()
    loaded = load_model(
        model,
        device=where,
        dtype=DTYPES[dtype],
        ops=ops,
        quantization=quantization,
        kv_dtype=kv_cache_dtype,
        context_tokens=context_tokens,
        cache_dir=cache,
        packed_cache=_packed_cache(packed_cache, packed_cache_bytes, cache),
        place=place,
        recommended_sampling=generation_config != "off",
        on_progress=on_progress,
    )
    decoder = loaded.decoder
    _check_state(decoder, block_size, where)
    shape = KvShape(
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        block_size=block_size,
        head_dim=decoder.head_dim,
        dtype=kv_format.DTYPES.get(kv_cache_dtype, loaded.dtype),
        state=decoder.state,
    )
    context = min(decoder.context_tokens, context_tokens or decoder.context_tokens)

    def capture(layers: Sequence[Tensor]) -> list[StepGraphs]:
        if cuda_graphs == "off" or where.type != "cuda":
            return []
        mixed = mixed_tokens(cuda_graphs, max_batch_tokens)
        return capture_graphs(
            decoder, layers, ops, max_batch_sequences, context, where, CudaGraphCapturer(where), mixed
        )

    team = _team_of(decoder)
    if team is not None:
        team.connect()
    own = shape if team is None else replace(shape, num_kv_heads=team.num_kv_heads)
    rehearsed = place is not None and bool(place.rehearsal)
    if kv_cache_bytes is None and where.type == "cpu" and not rehearsed:
        kv_cache_bytes = max(shape.bytes_per_block, cpu_block_bytes(available_bytes()))
    elif kv_cache_bytes is None:
        trial = trial_runner(loaded, own, ops, where, context)
        steps = worst_steps(max_batch_tokens, max_batch_sequences, context, block_size, decoder.vocab_size)
        if team is not None:
            work = [partial(trial.run, step) for step in steps]
            memory = RehearsedMemory() if rehearsed else CudaMemory(where)
            own_bytes = rank_block_bytes(memory, gpu_memory_utilization, team, decoder, trial.layers, work)
            kv_cache_bytes = own_bytes // own.bytes_per_block * shape.bytes_per_block
        else:
            kv_cache_bytes = measured_block_bytes(CudaMemory(where), gpu_memory_utilization, trial, steps, capture)
        if decoder.load_lora is not None:
            kv_cache_bytes -= adapter_share(kv_cache_bytes) if adapter_bytes is None else adapter_bytes
        trial.close()
    num_blocks = kv_cache_bytes // shape.bytes_per_block
    if num_blocks < 1:
        raise InvalidArgument(
            "kv_cache_bytes",
            f"{kv_cache_bytes} do not hold a block of {shape.bytes_per_block} bytes: give more, as many as the longest"
            " sequence needs at least",
        )
    if swap_bytes is None:
        swap_bytes = host_pool_bytes(available_bytes())
    num_host_blocks = swap_bytes // shape.bytes_per_block
    if team is not None:
        num_blocks, num_host_blocks = agreed_blocks(team, num_blocks, num_host_blocks)
        arena: KvArena = RankArena(shape, num_blocks, num_host_blocks, where, ops, team)
    else:
        shared = None
        if place is not None:
            shared = shape.arena_in(place.arena_memory(num_blocks * shape.bytes_per_block), num_blocks)
        arena = KvArena(shape, num_blocks, num_host_blocks, where, ops, shared)
    if batch_invariant:
        _expect_invariant(ops, decoder, arena)
    info = _info(loaded, arena, where, context, name)
    invariant = where.type == "cpu" and _is_invariant(ops, decoder, arena)
    ranks = 1 if team is None else team.place.size
    numerics = class_of(ops, decoder, loaded.dtype, shape.dtype, where, batch_invariant, ranks)
    share = adapter_share(kv_cache_bytes) if where.type == "cuda" else ADAPTER_BYTES
    info = replace(info, piece_invariant=invariant, numerics=numerics, adapter_bytes=share)
    _log_start(info, ops, decoder)
    _log_state(shape)
    sampler = choose_sampler(decoder.vocab_size, where, loaded.eos_token_ids)
    graphs = capture(arena.layers)
    for each in graphs:
        log.info("%s: CUDA graphs for %s of %s tokens", info.model, each.memory.kind, ", ".join(map(str, each.sizes)))
    return ModelRunner(info, decoder, arena, sampler, where, graphs, staged=team is not None)


def mixed_tokens(cuda_graphs: str, max_batch_tokens: int) -> int:
    """The most tokens of captured steps that are not decodes alone; 0 where such steps run eagerly."""
    return max_batch_tokens if cuda_graphs == "auto" else 0


def _team_of(decoder: Decoder) -> DeviceTeam | None:
    """Of a rank with a device of its own."""
    ranks = getattr(decoder, "ranks", None)
    return ranks if isinstance(ranks, DeviceTeam) else None


def adapter_share(block_bytes: int) -> int:
    """The memory of a GPU for low-rank adapters where nobody says how much: hardly any that blocks would miss."""
    return min(ADAPTER_BYTES, block_bytes // ADAPTER_SHARE)


def trial_runner(loaded: LoadedModel, shape: KvShape, ops: Ops, device: torch.device, context: int) -> ModelRunner:
    arena = KvArena(shape, 1, 0, device, ops)
    sampler = choose_sampler(loaded.decoder.vocab_size, device, loaded.eos_token_ids)
    return ModelRunner(_info(loaded, arena, device, context, None), loaded.decoder, arena, sampler, device)


def measured_block_bytes(
    memory: CudaMemory,
    utilization: float,
    trial: ModelRunner,
    steps: Sequence[StepInput],
    capture: Callable[[Sequence[Tensor]], object],
) -> int:
    """How many bytes blocks may take beside the steps, which are run, and what `capture` makes of their blocks."""
    work = [partial(trial.run, step) for step in steps]
    return gpu_block_bytes(memory, utilization, work, lambda: capture(trial.layers))


def _packed_cache(folder: Path | str, most_bytes: int, cache: Path | None) -> PackedCache | None:
    if folder == "auto":
        return PackedCache(cache / "packed", most_bytes) if cache else None
    return None if folder == "off" else PackedCache(Path(folder).expanduser(), most_bytes)


def default_cache() -> Path | None:
    """~/.cache/octavo; None where the user has no home directory, as in many containers."""
    try:
        return Path.home() / ".cache" / "octavo"
    except RuntimeError:
        return None


def _expect_invariant(ops: Ops, decoder: Decoder, arena: KvArena) -> None:
    if not _is_invariant(ops, decoder, arena):
        what = f"decoder {decoder.name} on {ops.name} ops, with a cache of {arena.shape.dtype_name}"
        raise InvalidArgument("batch_invariant", f"{what}: what a sequence gets depends on the batch")


def _is_invariant(ops: Ops, decoder: Decoder, arena: KvArena) -> bool:
    return decoder.batch_invariant and ops.batch_invariant(arena.layers[0], decoder.head_dim)


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
        keeps_state=bool(loaded.decoder.state.parts),
        window=loaded.decoder.window,
        tokenizer=loaded.tokenizer,
        sampling_defaults=loaded.sampling_defaults,
        pooling=loaded.pooling,
        lora_support=loaded.decoder.lora_support,
        pictures=loaded.decoder.picture_support,
        encoder=loaded.decoder.encoder_support,
    )


def _check_state(decoder: Decoder, block_size: int, device: torch.device) -> None:
    if not decoder.state.parts:
        if block_size > LARGEST_BLOCK:
            reason = f"{block_size} slots are for models with recurrent layers: say {LARGEST_BLOCK} at most"
            raise InvalidArgument("block_size", reason)
    elif device.type != "cpu":
        reason = f"{decoder.name} has recurrent layers, whose states have been kept on CPUs alone so far: say cpu"
        raise InvalidArgument("device", reason)


def _log_state(shape: KvShape) -> None:
    state, whole = shape.state.num_bytes, shape.bytes_per_block
    if state:
        log.info(
            "each block of %d tokens has a state of recurrent layers: %d of its %d bytes. A larger --block-size has"
            " fewer states, and prompts are found again at the ends of its blocks",
            *(shape.block_size, state, whole),
        )


def _log_start(info: RunnerInfo, ops: Ops, decoder: Decoder) -> None:
    log.info(
        "%s on %s: decoder %s, %s ops, %d blocks of %d tokens (%.2f GiB, %s), %d host blocks; numerics %s",
        *(info.model, info.device, decoder.name, ops.name, info.num_blocks, info.block_size),
        *(info.num_blocks * info.bytes_per_block / 2**30, info.layout, info.num_host_blocks, info.numerics),
    )
