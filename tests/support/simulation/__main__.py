"""Runs seeds: python -m simulation --seeds 500, --seeds 100-199, or --seeds 7-7 --log for every event of one."""

import argparse
import sys

from simulation.bugs import BUGS
from simulation.seeds import Summary, parse_seeds, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=parse_seeds, default="20", help="how many, or FIRST-LAST")
    parser.add_argument("--log", action="store_true", help="print every event")
    parser.add_argument("--json", type=float, default=0.0, help="the share of streams whose form is JSON")
    parser.add_argument("--bug", choices=sorted(BUGS), help="give the programs this bug, and stop when it is found")
    args = parser.parse_args()
    if args.bug:
        BUGS[args.bug]()
    summary = Summary()
    for seed in args.seeds:
        outcome = run_seed(seed, keep_log=args.log, json_share=args.json)
        summary.add(outcome)
        print(outcome.report(), flush=True)
        if args.bug and outcome.violations:
            break
    print(summary.report())
    return 1 if summary.is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
