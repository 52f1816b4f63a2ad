"""Loads changed models, one after the other, with little memory: `python -m malformed FOLDER FIRST COUNT [CASE]`.

Each is refused with one of octavo's errors, or it is loaded: then a text is tokenized and a step is run. Anything else
is a finding: another exception, memory beyond the limit, or more than CPU_S of processor time. A line of JSON says what
was found; the file `last` in the folder names the change that is being tried, for whoever sees this process die.
"""

import faulthandler
import gc
import json
import logging
import resource
import shutil
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from malformed.file_cases import FileCase, write_cases
from steps import Piece, step_of

from gpu_worker.models.through_transformers import decoder
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner
from octavo.request.errors import Code, ServingError
from octavo.text.tokenizers.tokenizer import open_tokenizer

MEMORY = 768 << 20  # beside what the process has when it begins; the seeds need a hundredth of that
CPU_S = 20.0
HANG_S = 3600  # on a machine with other work
PROMPT = [1, 2, 3, 4, 5]
log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What has come of the cases so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: int = 0
    slowest_s: float = 0.0
    slowest: str = ""

    def note(self, case: str, seed: int, outcome: str, seconds: float) -> None:
        self.outcomes[f"{case}: {outcome}"] += 1
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, f"{case} {seed}"


def main() -> None:
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    only = sys.argv[4] if len(sys.argv) > 4 else ""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    log.debug("with %s", decoder.__name__)  # which the loader imports late: seconds, and memory
    cases = [case for case in write_cases(folder / "seeds") if only in ("", case.name)]
    for case in cases:
        outcome = load(case, folder)  # the seed is valid, and what is imported later is imported now
        if outcome != "loaded":
            raise SystemExit(f"the seed of {case.name} is {outcome}")
    originals = {case: case.file.read_bytes() for case in cases}
    limit_memory()
    tally, largest = Tally(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(first, first + count):
        case = cases[seed % len(cases)]
        (folder / "last").write_text(f"{case.name} {seed}")
        case.write(originals[case], seed)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        began = time.process_time()
        try:
            outcome = load(case, folder)
        except BaseException as error:
            outcome = f"finding {type(error).__name__}"
            report(case, seed, error, tally)
        seconds = time.process_time() - began
        faulthandler.cancel_dump_traceback_later()
        if seconds > CPU_S:
            report(case, seed, TimeoutError(f"{seconds:.1f} s of processor time"), tally)
        tally.note(case.name, seed, outcome, seconds)
        case.file.write_bytes(originals[case])
        if seed % 200 == 0:
            gc.collect()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest) >> 10
    summary = {"tried": count, "findings": tally.findings, "grown_mib": grown, "slowest_s": round(tally.slowest_s, 2)}
    print(json.dumps({**summary, "slowest": tally.slowest, "outcomes": dict(sorted(tally.outcomes.items()))}))


def limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))


def load(case: FileCase, folder: Path) -> str:
    """`loaded`, or the class of the error that refuses it."""
    cache, runner = folder / "cache", None
    try:
        runner = load_runner(
            str(case.model), kv_cache_bytes=1 << 20, swap_bytes=0, block_size=8, cache_dir=cache, threads=1
        )
        use_tokenizer(runner.info.tokenizer)
        run_step(runner)
    except ServingError as error:
        if error.code == Code.INTERNAL or len(error.message) > 2000:
            raise
        return type(error).__name__
    finally:
        if runner is not None:
            runner.close()
        with suppress(FileNotFoundError):
            shutil.rmtree(cache)
    return "loaded"


def use_tokenizer(source: str) -> None:
    tokenizer = open_tokenizer(source)
    if not tokenizer.has_text:
        return
    ids = tokenizer.encode("hello world, 12345 <|im_end|>")
    tokenizer.decode(ids)
    with suppress(ServingError):
        tokenizer.apply_chat([("user", "hello"), ("assistant", "<|im_end|>"), ("user", "x" * 100)])


def run_step(runner: ModelRunner) -> None:
    info = runner.info
    prompt = [token % info.vocab_size for token in PROMPT[: info.context_tokens - 1]]
    if not prompt:
        return
    runner.run(step_of([Piece(prompt, len(prompt), [0])], info.block_size))


def report(case: FileCase, seed: int, error: BaseException, tally: Tally) -> None:
    tally.findings += 1
    where = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
    text = " ".join(str(error).split())[:200]
    place = "".join(f"{frame.filename}:{frame.lineno}" for frame in where)
    print(
        json.dumps({"case": case.name, "seed": seed, "error": type(error).__name__, "text": text, "at": place}),
        flush=True,
    )


if __name__ == "__main__":
    main()
