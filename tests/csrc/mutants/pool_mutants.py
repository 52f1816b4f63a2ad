"""Classic bugs in the thread pool: missing waits, and orders of memory that only ThreadSanitizer tells apart here."""

import re
from pathlib import Path

import pool_program
from mutant import Mutant, Sources, Suite

HEADER, POOL_CPP = "include/octavo/pool.h", "cpu/pool.cpp"

MUTANTS = {
    "missing wait at the end of a phase": Mutant(
        POOL_CPP,
        "spin([&] { return claim_.load(std::memory_order_acquire) - phase >= kPhase; });",
        "(void)phase;",
        (),
        "plain phases_wait",
    ),
    "missing wait at the end of a run": Mutant(
        POOL_CPP,
        "spin([&] { return state.inside.load(std::memory_order_acquire) == 0; });",
        "",
        (),
        "plain runs_wait",
    ),
    "a thread let in after the run": Mutant(
        POOL_CPP,
        "if (state.inside.fetch_add(1, std::memory_order_acq_rel) & State::kOpen) {",
        "state.inside.fetch_add(1, std::memory_order_acq_rel);\n        {",
        (),
        "plain late_threads_stay_out",
    ),
    "a fork goes on with its parent's pool": Mutant(
        POOL_CPP, "[] { pool->forget_parent(); }", "[] {}", (), "plain forks_have_their_own"
    ),
    "a part's results not released": Mutant(
        HEADER,
        "pool_.done_.fetch_add(1, std::memory_order_acq_rel)",
        "pool_.done_.fetch_add(1, std::memory_order_relaxed)",
        (),
        "tsan phases_wait",
    ),
    "a phase's results not released": Mutant(
        HEADER,
        "pool_.claim_.store(phase + Pool::kPhase, std::memory_order_release);",
        "pool_.claim_.store(phase + Pool::kPhase, std::memory_order_relaxed);",
        (),
        "tsan phases_wait",
    ),
    "a thread's results not released": Mutant(
        POOL_CPP,
        "state.inside.fetch_sub(1, std::memory_order_release);",
        "state.inside.fetch_sub(1, std::memory_order_relaxed);",
        (),
        "tsan runs_wait",
    ),
    "size changed without the lock": Mutant(
        POOL_CPP,
        "    const std::lock_guard<std::mutex> lock(state_->runs);\n    recruit(threads);",
        "    recruit(threads);",
        (),
        "tsan threads_take_turns",
    ),
}


def first_failure(folder: Path, which: str) -> str | None:
    how, promise = which.split(" ")
    done = pool_program.run(pool_program.made(folder / "csrc", folder / "build", how), promise)
    if done.returncode == 0:
        return None
    found = re.search(r"ThreadSanitizer: [\w ]+|broken: .*", done.stderr)
    return f"{promise} ({how}): {found[0] if found else f'ended with {done.returncode}'}"


POOL = Suite(MUTANTS, Sources, first_failure)
