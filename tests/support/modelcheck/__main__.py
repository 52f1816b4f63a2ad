"""Explores every configuration, and shows that each weaker store is seen.

    make modelcheck [ARGS='migration'] [ARGS='--traces mig_commit']

Arguments choose configurations and weakenings by parts of their names. `--traces` prints the steps that lead to what is
wrong. Ends with 1 if a configuration breaks a rule, is not explored completely, or a weakening is not seen.
"""

import sys

from modelcheck.callers import Callers, Configuration
from modelcheck.configurations import CONFIGURATIONS
from modelcheck.explorer import Exploration, explore
from modelcheck.weakenings import SECOND_LINES, WEAKENINGS

MAX_STATES = 1_500_000


def explored(configuration: Configuration) -> Exploration:
    return explore(Callers(configuration), MAX_STATES)


def row(name: str, found: Exploration, what: str, traces: bool) -> None:
    print(f"| {name} | {found.num_states:,} | {found.num_steps:,} | {found.seconds:.1f} | {what} |", flush=True)
    for step in found.trace if traces else ():
        print(f"|    | {step} |")


def main(arguments: list[str]) -> int:
    traces, parts = "--traces" in arguments, [each for each in arguments if not each.startswith("--")]

    def is_chosen(name: str) -> bool:
        return not parts or any(part in name for part in parts)

    failures = 0
    print("| configuration | states | steps | CPU s | found |\n|---|---|---|---|---|", flush=True)
    for name in filter(is_chosen, CONFIGURATIONS):
        found = explored(CONFIGURATIONS[name])
        failures += not found.good
        what = found.wrong or ("nothing" if found.complete else "TOO LARGE")
        row(name, found, what, traces=bool(found.wrong))
    print("\n| weakening | states | steps | CPU s | seen after |\n|---|---|---|---|---|", flush=True)
    for name in filter(is_chosen, WEAKENINGS):
        weakening = WEAKENINGS[name]
        with weakening.applied():
            found = explored(weakening.configuration)
        failures += not found.wrong
        row(name, found, f"{len(found.trace)} steps: {found.wrong}" if found.wrong else "NOT SEEN", traces)
    for name in filter(is_chosen, SECOND_LINES):
        print(f"\nNot in the table: {name}: {SECOND_LINES[name]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
