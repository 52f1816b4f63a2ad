"""The tables of docs/native.md: a row for each op, files that are there and know it, tables that have its figures."""

import re
from pathlib import Path
from types import ModuleType

import op_calls
import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_HEAD = "| op on a CPU |"
CUDA_HEAD = "| op on a GPU |"
GROUP_HEAD = "| class of a group |"
MEASURED = "".join((ROOT / "docs" / "measurements" / name).read_text() for name in ("cpu_ops.md", "worker.md"))
Rows = dict[str, list[str]]  # by op: the other cells of its row


def rows_below(head: str) -> Rows:
    """The rows of the table that begins with `head`. A row that several ops share is a row of each of them."""
    lines = (ROOT / "docs" / "native.md").read_text().splitlines()
    [start] = [number for number, line in enumerate(lines) if line.startswith(head)]
    found: Rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        for op in re.findall(r"`([\w.]+)`", first):
            found[op] = [
                f"{one} {other}".strip() for one, other in zip(found.get(op, [""] * len(others)), others, strict=True)
            ]
    return found


def files(cell: str, *folders: str) -> list[Path]:
    """The files that a cell names; each must be in one of the folders."""
    found = []
    for name in re.findall(r"`([\w./]+\.\w+)`", cell):
        places = [ROOT / folder / name for folder in folders if (ROOT / folder / name).exists()]
        assert places, f"{name} is not in {', '.join(folders)}"
        found += places[:1]
    return found


def knows(paths: list[Path], op: str) -> bool:
    """Whether one of them has the op's name, or that of its method."""
    word = re.compile(rf"\b{op.rpartition('.')[2]}\b")
    return any(word.search(path.read_text()) for path in paths)


def test_each_op_of_the_cpu_has_a_row(extension: ModuleType) -> None:
    offered = op_calls.signatures(extension)
    ops = {name for name in offered if "." in name or not isinstance(getattr(extension, name), type)}
    assert set(rows_below(CPU_HEAD)) == ops


def test_each_op_of_cuda_has_a_row() -> None:
    binding = (ROOT / "csrc/bind/cuda_module.cpp").read_text()
    ops = set(re.findall(r"^ +OCTAVO_(?:OP|ORDERED)\((\w+)", binding, re.MULTILINE))
    assert ops
    assert set(rows_below(CUDA_HEAD)) == ops | {"Swapper"}


def test_each_class_of_a_group_has_a_row() -> None:
    bound = set(re.findall(r"py::class_<(\w+)>", (ROOT / "csrc/bind/team.cpp").read_text()))
    assert bound
    assert set(rows_below(GROUP_HEAD)) == bound


@pytest.mark.parametrize("op", sorted(rows_below(CPU_HEAD) | rows_below(GROUP_HEAD)))
def test_files_of_a_cpu_op_are_its_own(op: str) -> None:
    kernel, definition, tests, figures = (rows_below(CPU_HEAD) | rows_below(GROUP_HEAD))[op]
    for cell, folders in (
        (kernel, ("csrc",)),
        (definition, ("csrc", ".")),
        (tests, ("tests/csrc", "tests/gpu_worker")),
    ):
        paths = files(cell, *folders)
        assert paths, f"no file in {cell!r}"
        assert knows(paths, op), f"none of {cell} knows {op}"
    titles = re.findall(r'"([^"]+)"', figures)
    assert titles and all(re.search(rf"^(\*\*|## ){title}", MEASURED, re.MULTILINE) for title in titles), figures


@pytest.mark.parametrize("op", sorted(rows_below(CUDA_HEAD)))
def test_files_of_a_cuda_op_are_its_own(op: str) -> None:
    kernel, cases, stages = rows_below(CUDA_HEAD)[op]
    assert files(kernel, "csrc")
    assert knows(files(cases, "tests/csrc/simt_cases"), op)
    check = (ROOT / "tests/gpu/check.py").read_text()
    named = re.findall(r"`(\w+)`", stages)
    assert named
    assert set(named) <= set(re.findall(r'Stage\("(\w+)"', check))
