"""Runs seeds: python -m simulation --seeds 500, --seeds 100-199, or --seeds 7-7 --log for every event of one."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from simulation.bugs import BUGS
from simulation.seeds import Summary, parse_seeds, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=parse_seeds, default="20", help="how many, or FIRST-LAST")
    parser.add_argument("--log", action="store_true", help="print every event")
    parser.add_argument("--json", type=float, default=0.0, help="the share of streams whose form is JSON")
    bugs = "give the programs these bugs, one after the other; each until it is found, and 1 if all are"
    parser.add_argument("--bug", choices=sorted(BUGS), nargs="+", default=[], help=bugs)
    args = parser.parse_args()
    if not args.bug:
        return run(args.seeds, keep_log=args.log, json_share=args.json)
    return int(all(in_child(lambda bug=bug: run_bug(bug, args.seeds, keep_log=args.log)) for bug in args.bug))


def run(seeds: Sequence[int], *, keep_log: bool, json_share: float = 0.0, until_bad: bool = False) -> int:
    summary = Summary()
    for seed in seeds:
        outcome = run_seed(seed, keep_log=keep_log, json_share=json_share)
        summary.add(outcome)
        print(outcome.report(), flush=True)
        if until_bad and outcome.violations:
            break
    print(summary.report(), flush=True)
    return 1 if summary.is_bad else 0


def run_bug(bug: str, seeds: Sequence[int], *, keep_log: bool) -> int:
    print(f"with {bug}:")
    BUGS[bug]()
    return run(seeds, keep_log=keep_log, until_bad=True)


def in_child(work: Callable[[], int]) -> int:
    """What it returns, in a process of its own: a bug is for good."""
    child = os.fork()
    if child == 0:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
