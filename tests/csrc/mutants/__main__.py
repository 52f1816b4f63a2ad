"""Seeds classic bugs into copies of the extension's sources, one at a time, and says which test sees each.

    make mutants [ARGS='pool cpu'] [ARGS='cuda "off-by-one page"']

By hand: up to a minute each. Prints a row of a table per bug, and ends with 1 if one survives, or if a
test sees bugs where there are none.
"""

import sys
import time

from cpu_mutants import CPU
from cuda_mutants import CUDA
from mutant import Suite
from pool_mutants import POOL

SUITES = {"pool": POOL, "cpu": CPU, "cuda": CUDA}


def survivors(suite: Suite, names: list[str]) -> list[str]:
    build, left = suite.build(), []
    chosen = {name: suite.mutants[name] for name in names or suite.mutants}
    for name, mutant in chosen.items():
        start = time.monotonic()
        with build.with_bug(mutant) as changed:
            seen = suite.first_failure(changed, mutant.by)
        print(f"| {name} | {seen or 'SURVIVES'} | {time.monotonic() - start:.0f} s |", flush=True)
        left += [] if seen else [name]
    for tests in sorted({mutant.by for mutant in chosen.values()}):
        failure = suite.first_failure(build.folder, tests)
        if failure is not None:
            raise RuntimeError(f"fails without a bug: {failure}")
    return left


def main(arguments: list[str]) -> int:
    chosen = [name for name in SUITES if name in arguments] or list(SUITES)
    names = [name for name in arguments if name not in SUITES]
    left = [name for suite in chosen for name in survivors(SUITES[suite], names)]
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
