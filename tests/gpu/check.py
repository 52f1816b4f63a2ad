"""`make gpu-check`: everything that only a GPU can say, in one command, in less than ten minutes, without a network.

    python tests/gpu/check.py [--rehearse] [--only smoke,decode] [--seconds 570]

Each stage is a process with a budget; a stage that fails or hangs does not keep the others from running. The report,
meant for docs/measurements/, is printed and left in build/gpu-check.md (and in $OUT). Exit status 1: a stage failed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    budget_s: float
    script: str
    arguments: tuple[str, ...] = ()
    tool: str = ""  # of compute-sanitizer
    rehearsal: tuple[str, ...] = ()  # instead of `arguments`


KERNELS = "decode_mma,decode_simt,prefill_mma,prefill_simt,vllm,write,blocks,convert,rows,linear,packed,fp8,sample"
SANITIZED = ("--cases", "2", "--only", KERNELS)
REHEARSAL_S = 600  # of a stage: on a CPU, time says nothing
STAGES = (
    Stage("build", 150, "build.py"),
    Stage("smoke", 25, "smoke.py"),
    Stage("fuzz", 75, "fuzz.py", rehearsal=("--only", "decode_mma,vllm,write,blocks,ops,compat")),
    Stage("memcheck", 55, "fuzz.py", SANITIZED, "memcheck", ("--only", "write")),
    Stage("racecheck", 55, "fuzz.py", SANITIZED, "racecheck", ("--only", "write")),
    Stage("model", 60, "model.py"),
    Stage("bandwidth", 20, "bandwidth.py"),
    Stage("decode", 45, "decode.py"),
    Stage("prefill", 25, "prefill.py"),
    Stage("movement", 30, "movement.py"),
    Stage("migration", 40, "migration.py"),
    Stage("rows", 30, "rows.py"),
    Stage("step", 40, "step.py"),
    Stage("group", 60, "group.py"),
)


@dataclass(slots=True)
class Result:
    stage: Stage
    outcome: str  # passed, FAILED, FAILED (out of time), not here
    seconds: float
    report: str


def run(stage: Stage, end: float, rehearse: bool) -> Result:
    began = time.monotonic()
    budget = REHEARSAL_S if rehearse else min(stage.budget_s, end - began)
    if budget < 5:
        return Result(stage, "FAILED (no time left)", 0, "")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if stage.tool and not rehearse and sanitizer is None:
        return Result(stage, "not here", 0, "there is no compute-sanitizer")
    environment = os.environ | {"GPU_CHECK_DEADLINE": str(began + 0.8 * budget), "PYTHONUNBUFFERED": "1"}
    path = [str(ROOT), *(str(ROOT / "tests" / each) for each in ("support", "csrc/simt_cases"))]
    environment["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.md"
        command = [sys.executable, str(HERE / stage.script), "--out", str(out)]
        command += ["--rehearse", *stage.rehearsal] if rehearse else stage.arguments
        if stage.tool and not rehearse:
            command[:0] = [str(sanitizer), "--tool", stage.tool, "--error-exitcode", "9", "--report-api-errors", "no"]
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that each tensor's end is known
        outcome, said = watched(command, environment, budget)
        text = out.read_text() if out.exists() else ""
    if outcome != "passed" or stage.tool:
        shown = said.strip()[-300 if outcome == "passed" else -2500 :]
        text += f"\n```text\n{shown}\n```\n"
    return Result(stage, outcome, time.monotonic() - began, text)


def watched(command: list[str], environment: dict[str, str], budget_s: float) -> tuple[str, str]:
    """How it ended, and what it said until then."""
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(budget_s)
            outcome = "passed" if status == 0 else f"FAILED (status {status})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a tool's child, too: it has the GPU
            process.wait()
            outcome = "FAILED (out of time)"
        file.seek(0)
        return outcome, file.read().decode(errors="replace")


def report(results: list[Result], rehearse: bool) -> str:
    title = (
        "Rehearsal on a CPU: its numbers mean nothing"
        if rehearse
        else f"`make gpu-check`, {datetime.now(UTC):%Y-%m-%d}"
    )
    lines = [f"### {title}", "", "| stage | | s |", "|---|---|---|"]
    lines += [f"| {r.stage.name} | {r.outcome} | {r.seconds:.0f} |" for r in results]
    for result in results:
        if result.report.strip():
            lines += ["", f"#### {result.stage.name}", "", result.report.strip()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with the kernels' simulator, tiny sizes")
    parser.add_argument("--only", default="", help="stages, separated by commas")
    parser.add_argument("--seconds", type=float, default=570, help="for all of it")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    wanted = options.only.split(",") if options.only else [stage.name for stage in STAGES]
    results: list[Result] = []
    for stage in STAGES:
        if stage.name not in wanted:
            continue
        results.append(run(stage, end, options.rehearse))
        print(f"{stage.name}: {results[-1].outcome}, {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        if stage.name == "build" and results[-1].outcome != "passed":
            break  # nothing else can run, or an old build would
    text = report(results, options.rehearse)
    print(text)
    for folder in filter(None, (str(ROOT / "build"), os.environ.get("OUT"))):
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "gpu-check.md").write_text(text)
    return 0 if all(result.outcome in ("passed", "not here") for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
