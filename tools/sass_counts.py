"""Counts the machine instructions of CUDA kernels, whole and in their innermost loops, from one or two builds.

    .venv/bin/python tools/sass_counts.py sm_90a 'prefill_mma.*BFloat.*Wide.*128' BUILD [BUILD]

A build is `gpu_worker/_C_cuda*.so` or a cubin (`nvcc -cubin -arch=sm_90a -std=c++17 -Icsrc -Icsrc/cuda -Icsrc/include
FILE.cu`). The pattern is searched in each kernel's name. A loop counts what one round of it has, both sides of branches
included. The quickest round of the main loop, which has the products, takes of all ways through it that have the most
products and asynchronous copies the one with the fewest instructions; a loop within it is gone through once.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)
SHOWN = {
    "products": r"HMMA",
    "matrix loads": r"LDSM",
    "asynchronous copies": r"LDGSTS",
    "global loads": r"LDG(?!STS)",
    "  of 16 bytes": r"LDG(?!STS)\S*\.128",
    "shared loads": r"LDS(?!M)",
    "global stores": r"STG",
    "shared stores": r"STS",
    "shared atomics": r"ATOMS",
    "  that compare and swap": r"ATOMS\.CAS",
    "exponentials, reciprocals": r"MUFU",
    "conversions": r"I2F|F2I|F2F|I2I",
    "integer multiplications": r"IMAD",
    "comparisons": r"[IF]SETP|[IF]MNMX",
    "selections": r"F?SEL",
    "shuffles": r"SHFL",
    "branches": r"BRA|BSSY|BSYNC|CALL|WARPSYNC",
}


def disassembler() -> str:
    """cuobjdump from NVIDIA's wheel, or from the CUDA toolkit."""
    wheel = importlib.util.find_spec("nvidia")
    roots = (wheel.submodule_search_locations or []) if wheel else []
    found = [str(path) for root in roots for path in sorted(Path(root).glob("*/bin/cuobjdump"))]
    tool = next(iter(found), None) or shutil.which("cuobjdump")
    if tool is None:
        sys.exit("there is no cuobjdump (the wheel nvidia-cuda-cuobjdump, or the CUDA toolkit)")
    return tool


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    predicate: str
    name: str
    operands: str

    @property
    def target(self) -> int:
        """Where a branch goes; -1 if it is none."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands.strip())
        return int(found[1], 16) if found and self.name.startswith(("BRA", "BSSY")) else -1


def kernels(build: str, architecture: str) -> dict[str, list[Instruction]]:
    """The instructions of each kernel, by the kernel's demangled name."""
    tool = disassembler()
    environment = os.environ | {"PATH": f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [tool, "--dump-sass", *([] if build.endswith(".cubin") else ["-arch", architecture]), build]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    parts = re.split(r"^\s*Function : (\S+)$", listing, flags=re.MULTILINE)
    names = subprocess.run(["c++filt"], input="\n".join(parts[1::2]), capture_output=True, text=True, check=True).stdout
    return {
        name: [Instruction(int(at, 16), *words) for at, *words in INSTRUCTION.findall(code)]
        for name, code in zip(names.splitlines(), parts[2::2], strict=True)
    }


def loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """First and last address of each loop."""
    return [(one.target, one.address) for one in code if one.name.startswith("BRA") and 0 <= one.target < one.address]


def between(code: list[Instruction], span: tuple[int, int]) -> list[Instruction]:
    return [one for one in code if span[0] <= one.address <= span[1]]


def innermost_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Each loop that has no loop within it, in order of addresses."""
    spans = loops(code)
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [between(code, span) for span in sorted(inner)]


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """The shortest of the loops that have the most products."""

    def rank(span: tuple[int, int]) -> tuple[int, int]:
        return sum(1 for one in between(code, span) if one.name.startswith("HMMA")), span[0] - span[1]

    return between(code, max(loops(code), key=rank, default=(0, -1)))


def quickest_round(loop: list[Instruction]) -> list[Instruction]:
    """The quickest way from the first instruction to the last one; of branches backwards none is taken."""
    places = {one.address: place for place, one in enumerate(loop)}
    best: dict[int, tuple[int, int, int]] = {0: (0, 0, -1)}  # by place: wanted, less instructions, the place before
    joins: dict[str, int] = {}
    for place, one in enumerate(loop):
        if place not in best:
            continue
        target, after = places.get(one.target, -1), [place + 1]
        if one.name == "BSSY":
            joins[one.operands.split(",")[0].strip()] = target
        elif one.name == "BSYNC":
            after = [joins.get(one.operands.strip(), place + 1)]
        elif one.name.startswith("BRA") and not one.name.startswith("BRA.DIV"):
            conditional = one.predicate or "P" in one.operands
            after = [target, place + 1] if conditional else [target]
        elif one.name.startswith("EXIT"):
            after = after if one.predicate else []
        wanted, rest, _ = best[place]
        reached = wanted + one.name.startswith(("HMMA", "LDGSTS")), rest - 1
        for next_place in after:
            if place < next_place < len(loop) and reached > best.get(next_place, (-1, 0, 0))[:2]:
                best[next_place] = *reached, place
    way, place = [], len(loop) - 1
    while place in best:
        way.append(loop[place])
        place = best[place][2]
    return way[::-1]


def count(code: list[Instruction]) -> Counter[str]:
    names = [one.name for one in code]
    counts = Counter({"instructions": len(names)})
    for shown, pattern in SHOWN.items():
        counts[shown] = sum(1 for name in names if re.match(pattern, name))
    return counts


def table(title: str, columns: list[Counter[str]]) -> None:
    print(f"  {title}")
    for shown in ("instructions", *SHOWN):
        if any(column[shown] for column in columns):
            print(f"    {shown:28}" + "".join(f"{column[shown]:8}" for column in columns))


def main(architecture: str, pattern: str, builds: list[str]) -> None:
    found = [kernels(build, architecture) for build in builds]
    for name in found[0]:
        if not re.search(pattern, name) or not all(name in one for one in found):
            continue
        print(name.split("(", 1)[0] if "<" not in name else name)
        table("whole", [count(one[name]) for one in found])
        if any(instruction.name.startswith("HMMA") for instruction in found[0][name]):
            table("quickest round of the main loop", [count(quickest_round(main_loop(one[name]))) for one in found])
        for number, one in enumerate(found):
            for place, loop in enumerate(innermost_loops(one[name])):
                table(f"build {number + 1}, innermost loop {place + 1}", [count(loop)])


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
