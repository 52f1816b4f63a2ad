"""Ops of other projects, each in a process of its own: in turns with ours, on the same numbers."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from _cases import Case, LinearCase, to_message
from _peer_loop import SAMPLE
from torch import Tensor

HERE = Path(__file__).parent
TOLERANCE = {"q8": 0.05, "q4": 0.2, "q4_mins": 0.2, "int8": 0.05, "float16": 0.02, "bfloat16": 0.03, "bf16": 0.03}


class Peer:
    """One process. `name` as in the table's head."""

    def __init__(self, name: str, command: Sequence[str | Path]) -> None:
        self.name = name
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "PYTHONPATH": str(HERE.parents[1])}
        self._process = subprocess.Popen(
            [str(part) for part in command],
            env=os.environ | threads,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def has(self, case: Case, ours: Tensor) -> bool:
        """Whether it has such an op, which then is what `seconds` runs; AssertionError if its result is not ours."""
        found = self._ask(to_message(case))
        if found is None:
            return False
        theirs = torch.tensor(found)
        want = ours.flatten()[:SAMPLE].float()
        error = float((theirs - want).norm() / want.norm())
        most = TOLERANCE.get(case.form if isinstance(case, LinearCase) else case.dtype, 1e-3)
        assert error < most, f"{self.name} differs by {error:.2%} in {case}"
        return True

    def seconds(self) -> float:
        return float(self._ask(None))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _ask(self, message: object) -> object:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: its process has ended ({self._process.wait()})")
        return json.loads(line)


def names(peers: Sequence[Peer]) -> list[str]:
    """Of all sides that a table has beside ours."""
    return ["torch", *(peer.name for peer in peers)]


def llama_cpp(folder: Path) -> Peer:
    return Peer("llama.cpp", [sys.executable, HERE / "_ggml_ops.py", folder])


def vllm_cpu(folder: Path) -> Peer:
    return Peer("vLLM-CPU", [folder / "bin" / "python", HERE / "_vllm_ops.py"])
