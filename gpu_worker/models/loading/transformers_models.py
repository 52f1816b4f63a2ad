"""Decoders around models of Transformers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from gpu_worker.models.checkpoint.weights import ReadTensors, WeightSource
from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.loading.load_options import without_8_bits
from gpu_worker.models.loading.packed_files import PackedFiles
from gpu_worker.models.packed.layer_stacks import StackPacking
from gpu_worker.models.packed.packed_weights import A8, PackedWeights
from gpu_worker.ops.native_cpu import NativeCpuOps
from octavo.model_files.quantization import SPEECH
from octavo.request.errors import InvalidArgument


def of_tensors(
    config: Mapping[str, Any],
    source: WeightSource,
    read: ReadTensors,
    kept: PackedFiles,
    rope_factors: Tensor | None = None,
) -> Decoder:
    """A decoder through Transformers, of which the extension multiplies the layers that it can on a CPU."""
    from gpu_worker.models.packed.packed_linear import LayerPacking
    from gpu_worker.models.through_transformers.decoder import TransformersDecoder

    packing, how, dtype = None, kept.how, kept.dtype
    if how.packs_layers():
        extension = cast("NativeCpuOps", how.ops).extension
        packing = LayerPacking(source, dtype, how.scheme, extension, how.progress, _packed_stacks(kept))
    decoder = TransformersDecoder.of_tensors(
        *(kept.name, config, read, dtype, how.ops, how.device, rope_factors, packing)
    )
    if how.rounds and decoder.packed is None:
        raise InvalidArgument("quantization", f"{how.quantization}: no layer of this model is packed: say auto")
    if how.quantization.endswith(A8) and not cast("PackedWeights", decoder.packed).rounds_to_8_bits():
        raise without_8_bits(how)
    return decoder


def encoder_decoder(content: Mapping[str, Any], path: Path, kept: PackedFiles) -> Decoder:
    from gpu_worker.models.packed.packed_linear import LinearPacking
    from gpu_worker.models.through_transformers.encoder_decoder import EncoderDecoder

    how, dtype, packing = kept.how, kept.dtype, None
    if how.device.type != "cpu":
        reason = "models with an encoder have been run on CPUs alone so far: say cpu"
        raise InvalidArgument("device", reason)
    if how.packs_layers() and how.rounds:
        extension = cast("NativeCpuOps", how.ops).extension
        packing = LinearPacking(dtype, how.quantization, extension, how.progress, _packed_stacks(kept))
    elif how.quantization.endswith(A8):
        raise without_8_bits(how)
    kind: type[EncoderDecoder] = EncoderDecoder
    if content.get("model_type") in SPEECH:
        from gpu_worker.models.through_transformers.speech_decoder import SpeechDecoder

        kind = SpeechDecoder
    return kind.load_with_encoder(path, dtype, how.ops, how.device, how.context_tokens, packing)


def _packed_stacks(kept: PackedFiles) -> Callable[[StackPacking], PackedWeights]:
    """Gets from a file what was packed, or packs."""
    return lambda stacks: kept.weights(stacks, {"stacks": stacks.key()})
