"""llama.cpp's matrix products and attention, through the C interface of its ggml, for `_peer.py`."""

import ctypes
import os
import sys
from collections.abc import Callable
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from _cases import PERIOD, AttentionCase, Case, LinearCase
from _llama_cpp import programs
from _peer_loop import Op, serve
from torch import Tensor

FORMS = {"f32": 0, "float32": 0, "float16": 1, "q4": 2, "q4_mins": 3, "q8": 8, "int8": 8, "bf16": 30, "bfloat16": 30}
TORCH = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
REPACKED = 2  # the one type that it rearranges for these CPUs, as its programs do on loading
F32, F16 = 0, 1
SCRATCH = 1 << 22


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Ggml:
    """Its libraries, and a backend on all cores."""

    def __init__(self, folder: Path) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        self.backend = self.function(self.cpu, "ggml_backend_cpu_init", c_void_p)()
        threads = len(os.sched_getaffinity(0))
        self.function(self.cpu, "ggml_backend_cpu_set_n_threads", None, c_void_p, c_int)(self.backend, threads)
        self.compute = self.function(self.base, "ggml_backend_graph_compute", c_int, c_void_p, c_void_p)

    @staticmethod
    def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(library, name)
        found.restype, found.argtypes = result, arguments
        return found

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """Integers are addresses, unless they come with a type."""
        typed = [
            (type(x), x) if isinstance(x, ctypes._SimpleCData | ctypes.Structure) else (c_void_p, x) for x in arguments
        ]
        return self.function(self.base, name, result, *(kind for kind, _ in typed))(*(x for _, x in typed))

    def repacking(self) -> int:
        """The kind of memory that rearranges weights on the way in."""
        registry = self.function(self.cpu, "ggml_backend_cpu_reg", c_void_p)()
        name = b"ggml_backend_dev_get_extra_bufts"
        find = self.call("ggml_backend_reg_get_proc_address", c_void_p, registry, ctypes.c_char_p(name))
        device = self.call("ggml_backend_reg_dev_get", c_void_p, registry, c_size_t(0))
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(find)(device)
        return int(kinds[0] or 0)


class Graph:
    """Tensors, and what is computed of them; their memory lives as long as this."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self._contexts: list[int] = []
        self._buffers: list[int] = []

    def context(self) -> int:
        """For some tensors, whose memory comes later."""
        made = self._ggml.call("ggml_init", c_void_p, InitParams(SCRATCH, None, True))
        self._contexts.append(made)
        return int(made)

    def tensor(self, context: int, form: int, *sizes: int) -> int:
        """Sizes from the innermost on."""
        whole = [c_int64(size) for size in (*sizes, 1, 1, 1)[:4]]
        return int(self._ggml.call("ggml_new_tensor_4d", c_void_p, context, c_int(form), *whole))

    def place(self, context: int, kind: int = 0) -> None:
        """Gives the tensors of a context memory: of the backend, or of some other kind."""
        name, where = ("_from_buft", kind) if kind else ("", self._ggml.backend)
        buffer = self._ggml.call(f"ggml_backend_alloc_ctx_tensors{name}", c_void_p, context, where)
        assert buffer, "no memory"
        self._buffers.append(buffer)

    def fill(self, tensor: int, values: Tensor) -> None:
        size = values.numel() * values.itemsize
        assert self._ggml.call("ggml_nbytes", c_size_t, tensor) == size
        self._ggml.call("ggml_backend_tensor_set", None, tensor, values.data_ptr(), c_size_t(0), c_size_t(size))

    def runner(self, context: int, result: int) -> Callable[[], object]:
        graph = self._ggml.call("ggml_new_graph", c_void_p, context)
        self._ggml.call("ggml_build_forward_expand", None, graph, result)
        self.place(context)
        compute, backend = self._ggml.compute, self._ggml.backend

        def run(held: "Graph" = self) -> None:
            assert compute(backend, graph) == 0

        return run

    def read(self, tensor: int) -> Tensor:
        """Its floats, as they lie."""
        size = self._ggml.call("ggml_nbytes", c_size_t, tensor)
        place = self._ggml.call("ggml_get_data", c_void_p, tensor)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(place), dtype=torch.float32)

    def __del__(self) -> None:
        for buffer in self._buffers:
            self._ggml.call("ggml_backend_buffer_free", None, buffer)
        for context in self._contexts:
            self._ggml.call("ggml_free", None, context)


def encoded(ggml: Ggml, values: Tensor, form: int) -> Tensor:
    """Rows of float32 in one of its forms."""
    if form in TORCH:
        return values.to(TORCH[form]).contiguous()
    rows = values.contiguous().view(-1, values.shape[-1])
    size = ggml.call("ggml_row_size", c_size_t, c_int(form), c_int64(rows.shape[1]))
    out = torch.empty(rows.shape[0], size, dtype=torch.uint8)
    sizes = c_int64(0), c_int64(rows.shape[0]), c_int64(rows.shape[1])
    ggml.call("ggml_quantize_chunk", c_size_t, c_int(form), rows.data_ptr(), out.data_ptr(), *sizes, None)
    return out


def linear(ggml: Ggml, case: LinearCase) -> Op:
    x, matrix = case.inputs()
    graph, form = Graph(ggml), FORMS[case.form]
    held = graph.context()
    weight = graph.tensor(held, form, case.inner, case.rows)
    graph.place(held, ggml.repacking() if form == REPACKED else 0)
    graph.fill(weight, encoded(ggml, matrix[:PERIOD], form).repeat(case.rows // PERIOD, 1))
    context = graph.context()
    inputs = graph.tensor(context, F32, case.inner, case.columns)
    out = int(ggml.call("ggml_mul_mat", c_void_p, context, weight, inputs))
    run = graph.runner(context, out)
    graph.fill(inputs, x)
    return run, lambda: graph.read(out)


def attention(ggml: Ggml, case: AttentionCase) -> Op | None:
    if case.dtype not in FORMS:
        return None
    queries, *pages = case.inputs()
    graph, form = Graph(ggml), FORMS[case.dtype]
    context = graph.context()
    q = graph.tensor(context, F32, case.dim, case.queries, case.heads, case.sequences)
    k, v = (graph.tensor(context, form, case.dim, case.context, case.kv_heads, case.sequences) for _ in range(2))
    mask = graph.tensor(context, F16, case.context, case.queries) if case.queries > 1 else None
    options = c_float(case.scale), c_float(0), c_float(0)
    out = int(ggml.call("ggml_flash_attn_ext", c_void_p, context, q, k, v, mask, *options))
    run = graph.runner(context, out)
    graph.fill(q, queries.transpose(1, 2).contiguous())
    for tensor, values in zip((k, v), pages, strict=True):
        graph.fill(tensor, encoded(ggml, values, form))
    if mask is not None:
        hidden = torch.full((case.queries, case.context), -torch.inf).triu(case.context - case.queries + 1)
        graph.fill(mask, hidden.half())
    return run, lambda: graph.read(out)


def main() -> None:
    ggml = Ggml(programs(Path(sys.argv[1])))

    def make(case: Case) -> Op | None:
        return linear(ggml, case) if isinstance(case, LinearCase) else attention(ggml, case)

    serve(make)


if __name__ == "__main__":
    main()
