"""The class of numerics of a runner: everything by which its bits may differ from the bits of another runner of its
model.

Runners whose classes and layouts are equal compute the same bits from the same weights, as far as the bits do not
depend on what else a step computes (`Ops.batch_invariant`). Classes are made too narrow rather than too wide: what has
not been seen to give equal bits (`tests/gpu_worker/models/test_numerics.py`) has a class of its own.

A class is for people to read and has no spaces, such as
`cpu/native-2/avx2/gcc-12.2.0/q4_mins+q8/in=15-bits/rope=0a1b2c3d`.
The type of the cache is not in it: the layout has it.
"""

import ctypes
import hashlib
from pathlib import Path

import torch

from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.decoders.native_llama import NativeLlamaDecoder
from gpu_worker.models.layer_programs.programs import PROGRAM_BITS
from gpu_worker.ops import Ops
from gpu_worker.ops.native import CPU_BITS, CUDA_BITS, INVARIANT_BITS
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.native_cuda import NativeCudaOps

IN_FLOATS = (torch.float32, torch.float16)  # keys and values of these types are multiplied in float32 everywhere


def class_of(
    ops: Ops,
    decoder: Decoder,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
    ranks: int = 1,
) -> str:
    """The class of a runner with these parts. `dtype` is that of a decoder in torch. `ranks` have a device each.

    A product of fewer rows of a matrix may have other bits, with cuBLAS and in torch: how many ranks divide it is part
    of the class. The extension's own products, on a CPU and with `batch_invariant`, sum each row in one order.
    """
    name = str(dtype).removeprefix("torch.")
    if isinstance(decoder, NativeLlamaDecoder) and isinstance(ops, NativeCpuOps):
        # Of torch it has nothing but the table of positions, and what encodes pictures.
        encodes_in_halves = decoder.encode_picture is not None and dtype == torch.bfloat16
        in_halves = kv_dtype not in IN_FLOATS or "halves" in decoder.arithmetic or encodes_in_halves
        encoder = (
            () if decoder.encode_picture is None else ("pictures", name, f"torch-{torch.__version__}", *_torch_cpu())
        )
        return _joined(*_native_cpu(ops, in_halves), decoder.arithmetic, f"rope={_digest(decoder.rope)}", *encoder)
    decoded: tuple[str, ...] = (
        type(decoder).__name__.removesuffix("Decoder").lower(),
        name,
        f"torch-{torch.__version__}",
    )
    if ranks > 1 and not batch_invariant and not isinstance(ops, NativeCpuOps):
        decoded = (*decoded, f"ranks-{ranks}")
    if device.type == "cuda":
        kind = f"native-{CUDA_BITS}" if isinstance(ops, NativeCudaOps) else "reference"
        invariant = f"batch-invariant-{INVARIANT_BITS}" if batch_invariant else ""
        kept = "+".join(getattr(decoder, "formats", ()))  # of weights that are not decoded: other kernels than cuBLAS's
        return _joined("cuda", kind, *decoded, kept, *_gpu(device), invariant)
    in_halves = kv_dtype not in IN_FLOATS or (dtype == torch.bfloat16 and bool(getattr(decoder, "products", "")))
    has_programs = any(getattr(decoder, name, None) for name in ("programs", "stack_programs"))
    programs = f"programs-{PROGRAM_BITS}" if has_programs else ""
    decoded = (*decoded, programs, getattr(decoder, "products", ""))
    if packed := getattr(decoder, "packed", None):
        decoded = (*decoded, packed.arithmetic())
    parts = _native_cpu(ops, in_halves) if isinstance(ops, NativeCpuOps) else ("cpu", "reference")
    return _joined(*parts, *decoded, *_torch_cpu())


def _torch_cpu() -> tuple[str, ...]:
    """Torch's products on a CPU are those of libraries that look at the processor themselves, and at the threads."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return capability, _processor(), f"threads={torch.get_num_threads()}"


def _joined(*parts: str) -> str:
    return "/".join("-".join(part.split()) for part in parts if part)


def _native_cpu(ops: NativeCpuOps, in_halves: bool) -> tuple[str, ...]:
    """Compilers choose which products they fuse with which sums."""
    compiler = str(ops.extension.build_info()["compiler"])
    return "cpu", f"native-{CPU_BITS}", least_equal(str(ops.extension.isa()), in_halves), compiler


def least_equal(isa: str, in_halves: bool) -> str:
    """The least instruction set whose kernels give the bits of this one. `in_halves`: whether something is multiplied
    in bfloat16, where the processor can: keys and values that are no longer than that, or weights."""
    if isa == "avx512" or (isa == "avx512_bf16" and not in_halves):
        return "avx2"
    return isa


def _gpu(device: torch.device) -> tuple[str, ...]:
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm{major}{minor}", f"cuda-{torch.version.cuda}", _cublas()


def _cublas() -> str:
    """The version of the cuBLAS that torch has loaded; empty where it does not say."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
        numbers = [ctypes.c_int() for _ in range(3)]
        failed = any(library.cublasGetProperty(kind, ctypes.byref(number)) for kind, number in enumerate(numbers))
    except (OSError, AttributeError):
        return ""
    return "" if failed else "cublas-" + ".".join(str(number.value) for number in numbers)


def _processor() -> str:
    """The processor's name, as Linux shows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return next(names, "").strip().replace("/", "-")


def _digest(tables: tuple[torch.Tensor, ...]) -> str:
    state = hashlib.blake2b(digest_size=4)
    for table in tables:
        state.update(table.contiguous().numpy().data)
    return state.hexdigest()
