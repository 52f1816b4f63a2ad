"""Lists of ops: docs/native.md has each, with files that know it and figures; an op of one name has one signature."""

import re
from pathlib import Path
from types import ModuleType

import op_calls

from gpu_worker.ops import native

ROOT = Path(__file__).resolve().parents[2]
MEASURED = "".join((ROOT / "docs" / "measurements" / name).read_text() for name in ("cpu_ops.md", "worker.md"))
CUDA_MODULE = (ROOT / "csrc/bind/cuda_module.cpp").read_text()
# Why the two modules differ, where they do. The stream, which every CUDA op has last, is no difference.
DIFFERENT = {
    "paged_attention": "a GPU's is launched by a plan that whole steps share; a CPU plans within the call",
    "sample": "a GPU's kernel draws; adjustments and scores, which are this op's on a CPU, are penalize and logprobs",
}


def rows_below(head: str) -> dict[str, list[str]]:
    """By op the other cells of its row. A row that several ops share is a row of each of them."""
    _, _, below = (ROOT / "docs" / "native.md").read_text().partition(f"\n{head}")
    found: dict[str, list[str]] = {}
    for line in re.match(r".*\n.*\n((?:\|.*\n)*)", below)[1].splitlines():
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        for op in re.findall(r"`([\w.]+)`", first):
            kept = found.get(op, [""] * len(others))
            found[op] = [f"{one} {other}".strip() for one, other in zip(kept, others, strict=True)]
    return found


CPU, CUDA = rows_below("| op on a CPU |"), rows_below("| op on a GPU |")
GROUP = rows_below("| class of a group |")


def known(op: str, cell: str, *folders: str) -> None:
    """The cell names files in these folders, and one of them has the op's name, or that of its method."""
    names = re.findall(r"`([\w./]+\.\w+)`", cell)
    found = [
        next((ROOT / folder / name for folder in folders if (ROOT / folder / name).exists()), name) for name in names
    ]
    assert found and not [each for each in found if isinstance(each, str)], f"{op}: {found} in {folders}"
    word = re.compile(rf"\b{op.rpartition('.')[2]}\b")
    assert any(word.search(path.read_text()) for path in found), f"none of {cell} knows {op}"


def test_each_op_has_a_row(extension: ModuleType) -> None:
    offered = op_calls.signatures(extension)
    assert set(CPU) == {name for name in offered if "." in name or not isinstance(getattr(extension, name), type)}
    ops = set(re.findall(r"^ +OCTAVO_(?:OP|ORDERED)\((\w+)", CUDA_MODULE, re.MULTILINE))
    assert ops and set(CUDA) == ops | {"Swapper"}


def test_files_of_an_op_are_its_own() -> None:
    for op, (kernel, definition, tests, figures) in (CPU | GROUP).items():
        known(op, kernel, "csrc")
        known(op, definition, "csrc", ".")
        known(op, tests, "tests/csrc", "tests/gpu_worker")
        titles = re.findall(r'"([^"]+)"', figures)
        assert titles and all(re.search(rf"^(\*\*|## ){title}", MEASURED, re.MULTILINE) for title in titles), figures
    stages = set(re.findall(r'Stage\("(\w+)"', (ROOT / "tests/gpu/check.py").read_text()))
    for op, (kernel, cases, named) in CUDA.items():
        assert all((ROOT / "csrc" / name).exists() for name in re.findall(r"`([\w./]+\.\w+)`", kernel)), op
        known(op, cases, "tests/csrc/simt_cases")
        assert (found := set(re.findall(r"`(\w+)`", named))) and found <= stages, op


def test_each_class_of_a_group_has_a_row() -> None:
    bound = set(re.findall(r"py::class_<(\w+)>", (ROOT / "csrc/bind/team.cpp").read_text()))
    assert bound and set(GROUP) == bound | {"LoraRoom"}  # which is bound beside the adapters of one process


def names(thing: object) -> list[str]:
    return re.findall(r"(\w+): ", (thing.__doc__ or "").split(" -> ")[0])


def test_ops_of_one_name_take_the_same_arguments(extension: ModuleType) -> None:
    """Ops are what takes tensors. pybind11 has no names for CUDA's, so they are read from the module's source."""
    cpu = {name: names(op) for name, op in vars(extension).items() if not isinstance(op, type)}
    cpu = {name: arguments for name, arguments in cpu.items() if "torch.Tensor" in getattr(extension, name).__doc__}
    named = re.findall(r'OCTAVO_(?:OP|ORDERED)\((\w+),\s*"\(([^)]*)\)"\)', CUDA_MODULE)
    cuda = {name: arguments.replace("\n", " ").split(", ") for name, arguments in named}
    shared = cpu.keys() & cuda.keys()
    assert len(shared) >= 8
    for name in shared:
        assert (cuda[name] == [*cpu[name], "stream"]) == (name not in DIFFERENT), name
    if (module := native.load_cuda()) is not None:
        assert names(module.KvCache.__init__) == names(extension.KvCache.__init__)
