"""Classic bugs in the thread pool: missing waits, and orders of memory that only ThreadSanitizer tells apart here."""

import re
from pathlib import Path

import pool_program
from mutant import Sources, Suite, of_places

HEADER, POOL_CPP = "include/octavo/pool.h", "cpu/pool.cpp"

MUTANTS = of_places(
    {
        (POOL_CPP, (), "plain phases_wait"): {
            "missing wait at the end of a phase": (
                "spin([&] { return claim_.load(std::memory_order_acquire) - phase >= kPhase; });",
                "(void)phase;",
            ),
        },
        (POOL_CPP, (), "plain runs_wait"): {
            "missing wait at the end of a run": (
                "spin([&] { return state.inside.load(std::memory_order_acquire) == 0; });",
                "",
            ),
        },
        (POOL_CPP, (), "plain late_threads_stay_out"): {
            "a thread let in after the run": (
                "if (state.inside.fetch_add(1, std::memory_order_acq_rel) & State::kOpen) {",
                "state.inside.fetch_add(1, std::memory_order_acq_rel);\n        {",
            ),
        },
        (POOL_CPP, (), "plain forks_have_their_own"): {
            "a fork goes on with its parent's pool": ("[] { pool->forget_parent(); }", "[] {}"),
        },
        (HEADER, (), "tsan phases_wait"): {
            "a part's results not released": (
                "pool_.done_.fetch_add(1, std::memory_order_acq_rel)",
                "pool_.done_.fetch_add(1, std::memory_order_relaxed)",
            ),
            "a phase's results not released": (
                "pool_.claim_.store(phase + Pool::kPhase, std::memory_order_release);",
                "pool_.claim_.store(phase + Pool::kPhase, std::memory_order_relaxed);",
            ),
        },
        (POOL_CPP, (), "tsan runs_wait"): {
            "a thread's results not released": (
                "state.inside.fetch_sub(1, std::memory_order_release);",
                "state.inside.fetch_sub(1, std::memory_order_relaxed);",
            ),
        },
        (POOL_CPP, (), "tsan threads_take_turns"): {
            "size changed without the lock": (
                "    const std::lock_guard<std::mutex> lock(state_->runs);\n    recruit(threads);",
                "    recruit(threads);",
            ),
        },
    }
)


def first_failure(folder: Path, which: str) -> str | None:
    how, promise = which.split(" ")
    done = pool_program.run(pool_program.made(folder / "csrc", folder / "build", how), promise)
    if done.returncode == 0:
        return None
    found = re.search(r"ThreadSanitizer: [\w ]+|broken: .*", done.stderr)
    return f"{promise} ({how}): {found[0] if found else f'ended with {done.returncode}'}"


POOL = Suite(MUTANTS, Sources, first_failure)
