"""What a stage runs on, and how it reports."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True

import torch  # noqa: E402

T = TypeVar("T")


@dataclass(slots=True)
class Target:
    """The device and the extension. In a rehearsal: the CPU and the simulator."""

    device: torch.device
    extension: Any
    rehearsal: bool
    out: Path | None
    options: argparse.Namespace
    lines: list[str] = field(default_factory=list)

    def pick(self, full: T, tiny: T) -> T:
        """The value for a GPU, or a tiny one that is enough to see that the script runs."""
        return tiny if self.rehearsal else full

    @property
    def stream(self) -> int:
        return 0 if self.rehearsal else torch.cuda.current_stream(self.device).cuda_stream

    def wait(self) -> None:
        if not self.rehearsal:
            torch.cuda.synchronize(self.device)

    def say(self, line: str = "") -> None:
        """Prints a line and adds it to the report."""
        self.lines.append(line)
        print(line, flush=True)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.say(f"\n**{title}**\n")
        self.say("| " + " | ".join(head) + " |")
        self.say("|" + "---|" * len(head))
        for row in rows:
            self.say("| " + " | ".join(map(str, row)) + " |")

    def finish(self, good: bool = True) -> None:
        if self.out:
            self.out.write_text("\n".join(self.lines) + "\n")
        sys.exit(0 if good else 1)


def target(**extra: dict[str, Any]) -> Target:
    """Reads the command line: --rehearse, --out FILE, and the options of the stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path)
    for name, how in extra.items():
        parser.add_argument(f"--{name}", **how)
    options = parser.parse_args()
    if options.rehearse:
        import _C_cuda_simt as extension

        torch.set_num_threads(1)
        return Target(torch.device("cpu"), extension, True, options.out, options)
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    from gpu_worker.ops import native

    found = native.load_cuda()
    if found is None or not found.device_count():
        sys.exit("gpu_worker/_C_cuda is not there or sees no device: run tests/gpu/build.py")
    torch.cuda.set_device(0)
    return Target(torch.device("cuda", 0), found, False, options.out, options)


def deadline() -> float:
    """When this stage must be done, by time.monotonic(): check.py says so."""
    return float(os.environ.get("GPU_CHECK_DEADLINE", time.monotonic() + 60))
