"""The CPU kernels that steps spend their time in against what this machine can do, and torch; and whole steps.

    python tests/bench/kernels.py [--only linears decode prefill draws recurrences steps] [--match REGEX] [--quick]

Sides take turns on the same numbers; medians. The machine's own rates (torch's sum and
copy, and a loop of the instruction that the kernel multiplies with, alone) are sides like the others, so that each row
has its roof from the seconds it was measured in; torch's empty the caches.
"""

import argparse
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from _attention import decodes, prompts
from _draws import draws
from _linears import linears
from _recurrences import recurrences
from _service import describe_machine
from _steps import steps
from _table import Machine, Plan

from gpu_worker.ops import native

PARTS = ("linears", "decode", "prefill", "draws", "recurrences", "steps")


def run(args: argparse.Namespace) -> None:
    extension = native.load()
    if extension is None:
        raise SystemExit("the extension was not built: make extension")
    if args.isa:
        extension.select_isa(args.isa)
    print(f"{describe_machine()}; {args.isa or extension.isa()}, {extension.threads()} threads")
    plan = Plan(Machine(), args.repeats, args.quick, args.match)
    parts = {
        "linears": lambda: linears(extension, plan),
        "decode": lambda: decodes(extension, plan),
        "prefill": lambda: prompts(extension, plan),
        "draws": lambda: draws(extension, plan),
        "recurrences": lambda: recurrences(extension, plan),
        "steps": lambda: steps(plan),
    }
    for name in args.only:
        parts[name]()
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--match", type=re.compile, default="", metavar="REGEX", help="rows, by their first cell")
    parser.add_argument("--isa", default="", help="a lesser instruction set than the best one")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
