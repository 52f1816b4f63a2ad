"""`octavo doctor`: checks whether this machine has what `octavo up` needs, and says what to do where it has not."""

import argparse
import asyncio
from dataclasses import asdict

from octavo.cli import checks, output
from octavo.local import state
from octavo.settings.command_parser import USAGE
from octavo.settings.loading import add_common_arguments, from_args
from octavo.settings.setting_sources import add_arguments
from octavo.settings.up import UpSettings

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor", help="check this machine, and say what to fix", usage=USAGE, description=__doc__
    )
    add_common_arguments(parser, [UpSettings])
    add_arguments(parser, UpSettings, skip=("restart",))
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    up = from_args(UpSettings, args)
    found = asyncio.run(checks.all_checks(up, _running(up)))
    healthy = all(check.result != "bad" for check in found)
    if args.json:
        output.print_json({"healthy": healthy, "checks": [asdict(check) for check in found]}, indent=2)
    else:
        for check in found:
            print(f"{MARKS[check.result]} {check.name:12} {check.detail}")
            if check.fix:
                print(f"     {'':12} -> {check.fix}")
        print("\nnothing is missing" if healthy else "\nfix what is marked BAD, then run it again")
    return 0 if healthy else 1


def _running(up: UpSettings) -> state.ClusterState | None:
    try:
        return state.read(state.directory_of(up.state_dir))
    except state.StateDirectoryError:
        return None  # a check of its own says so
