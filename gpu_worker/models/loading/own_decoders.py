"""octavo's own decoders, of tensors that are open: on the extension, with weights kept on a GPU, or op by op."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import BlockSource, CheckpointReader, WeightSource
from gpu_worker.models.decoders import gpt, gpt_weights, llama
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.decoders.gpt_families import read_gpt_config
from gpu_worker.models.decoders.native_llama import LlamaPacking, NativeLlamaDecoder
from gpu_worker.models.decoders.ranks.device_share import LlamaDeviceShare, gpt_team
from gpu_worker.models.decoders.ranks.gpt_share import GptShare
from gpu_worker.models.decoders.ranks.gpt_team import GptTeam
from gpu_worker.models.loading.load_options import LoadOptions, without_8_bits
from gpu_worker.models.loading.packed_files import PackedFiles
from gpu_worker.models.packed import cuda_packing
from gpu_worker.models.packed.packed_weights import A8
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.native_cuda import NativeCudaOps
from octavo.request.errors import InvalidArgument


def native(
    source: WeightSource, config: LlamaConfig, dtype: torch.dtype, how: LoadOptions, kept: PackedFiles
) -> Decoder:
    """A decoder of the extension."""
    extension = cast("NativeCpuOps", how.ops).extension
    if how.quantization == f"auto{A8}" and not isinstance(source, BlockSource):
        raise without_8_bits(how)
    packed = kept.weights(LlamaPacking(source, config, dtype, how.scheme, extension, how.progress), {})
    if how.quantization.endswith(A8) and not packed.rounds_to_8_bits():
        raise without_8_bits(how)
    return NativeLlamaDecoder(config.rounded_to(dtype), packed, extension, how.place)


def kept(source: WeightSource, config: LlamaConfig, dtype: torch.dtype, how: LoadOptions) -> Decoder:
    """A decoder on a GPU whose matrices stay in 4 bits and fp8."""
    if dtype == torch.float32:
        raise InvalidArgument("quantization", "kept multiplies in 16 bits: say --dtype bfloat16 or float16")
    rounds = how.quantization.endswith(A8)
    if rounds and not cast("NativeCudaOps", how.ops).extension.multiplies_fp8(how.device.index or 0):
        reason = "the kernels of this build multiply no fp8 on this GPU: it takes 8.9 or later, and code for it"
        raise InvalidArgument("quantization", f"{how.quantization}: {reason}: say kept")
    checkpoint = CheckpointReader(source, dtype, how.progress)
    tensors = llama.collect(checkpoint, cuda_packing.stacks(source, checkpoint, rounds), config)
    decoder = llama.LlamaDecoder(config, tensors, how.ops, how.device)
    if rounds and not any(each.endswith(A8) for each in decoder.formats):
        reason = "inputs are rounded where the checkpoint is fp8 and says how, and no layer has such a matrix"
        raise InvalidArgument("quantization", f"{how.quantization}: {reason}: say kept")
    return decoder


def op_by_op(
    config: LlamaConfig,
    tensors: dict[str, Tensor],
    how: LoadOptions,
    share: LlamaDeviceShare | None,
    *,
    is_cut: bool,
) -> Decoder:
    """With a share its matrices have the own rows alone, if they are cut already."""
    if share is None:
        return llama.LlamaDecoder(config, tensors, how.ops, how.device)
    own = share.finished(tensors, is_cut=is_cut)
    return llama.LlamaDecoder(config, own, how.ops, how.device, share.team(how.device))


def gpt_decoder(source: WeightSource, content: Mapping[str, Any], dtype: torch.dtype, how: LoadOptions) -> Decoder:
    how.refuse_packed()
    sizes = read_gpt_config(content)
    share = None if how.place is None else GptShare.of(sizes, how.place)  # before the tensors are read
    on_device = gpt_team(sizes, how.place) if how.place is not None and how.place.has_device else None
    tensors = gpt_weights.prepare(source, sizes, dtype, how.progress)
    if how.place is None or share is None:
        return gpt.GptDecoder(sizes, tensors, how.ops, how.device)
    if on_device is not None:
        return gpt.GptDecoder(sizes, share.cut(tensors, sizes), how.ops, how.device, on_device(how.device))
    team = GptTeam(sizes, share, how.place, dtype)
    return gpt.GptDecoder(sizes, share.cut(tensors, sizes), how.ops, how.device, team)
