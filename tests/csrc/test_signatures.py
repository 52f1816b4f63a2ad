"""An op has one signature: what `_C_cpu` and `_C_cuda` both have takes the same arguments in the same order.

Ops are what takes tensors. `plan_attention` takes none: it tells a test what a CPU's threads do, and plans for a GPU.
"""

import re
from pathlib import Path

import pytest

from gpu_worker.ops import native

# Why the two differ, where they do. The stream, which every CUDA op has last, is no difference.
DIFFERENT = {
    "paged_attention": "a GPU's is launched by a plan that whole steps share; a CPU plans within the call",
    "sample": "a GPU's kernel draws; adjustments and scores, which are this op's on a CPU, are penalize and logprobs",
}


def cpu_ops(module) -> dict[str, list[str]]:
    """The arguments of each op that takes tensors, by name."""
    found = {}
    for name, op in vars(module).items():
        if callable(op) and not isinstance(op, type) and "torch.Tensor" in (op.__doc__ or ""):
            found[name] = re.findall(r"(\w+): ", op.__doc__.split(" -> ")[0])
    return found | {"packed_bytes": ["format", "rows", "cols"]}


def cuda_ops() -> dict[str, list[str]]:
    """The arguments of each CUDA op. pybind11 has no names for them, so they are read from the module's source."""
    source = Path(__file__).parents[2] / "csrc" / "bind" / "cuda_module.cpp"
    named = re.findall(r'OCTAVO_(?:OP|ORDERED)\((\w+),\s*"\(([^)]*)\)"\)', source.read_text())
    return {name: arguments.replace("\n", " ").split(", ") for name, arguments in named}


def test_ops_of_one_name_take_the_same_arguments():
    module = native.load()
    if module is None:
        pytest.skip("the extension was not built")
    cpu, cuda = cpu_ops(module), cuda_ops()
    shared = cpu.keys() & cuda.keys()
    assert len(shared) >= 8
    for name in sorted(shared - DIFFERENT.keys()):
        assert [*cpu[name], "stream"] == cuda[name], name
    for name in DIFFERENT:
        assert [*cpu[name], "stream"] != cuda[name], f"{name} is the same now"


def test_both_have_the_same_caches():
    cpu, cuda = native.load(), native.load_cuda()
    if cpu is None or cuda is None:
        pytest.skip("one of the extensions was not built")
    both = [re.findall(r"(\w+): ", module.KvCache.__init__.__doc__.split(" -> ")[0]) for module in (cpu, cuda)]
    assert both[0] == both[1]
