"""`octavo doctor`: checks whether this machine has what `octavo up` needs, and says what to do where it has not."""

import argparse
import asyncio
from dataclasses import asdict

from octavo.cli import output
from octavo.cli.doctor import CheckReport, machine_checks, model_checks, model_size, native_checks, store_check
from octavo.local import state
from octavo.settings.command_parser import USAGE
from octavo.settings.loading import add_common_arguments, from_args
from octavo.settings.setting_sources import add_arguments
from octavo.settings.up import UpSettings

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "check this machine, and say what to fix"
    parser = commands.add_parser("doctor", help=text, usage=USAGE, description=__doc__)
    add_common_arguments(parser, [UpSettings])
    add_arguments(parser, UpSettings, skip=("restart",))
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    up = from_args(UpSettings, args)
    found = asyncio.run(_all_checks(up))
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


async def _all_checks(up: UpSettings) -> list[CheckReport]:
    """The reports of all checks. The ports of the `octavo up` of this state directory count as free."""
    try:
        running = state.read(state.directory_of(up.state_dir))
    except state.StateDirectoryError:
        running = None  # a check of its own says so
    return [
        machine_checks.python_version(),
        machine_checks.packages(),
        *machine_checks.port_checks(up, running),
        machine_checks.directory(up.state_dir),
        await store_check.store(up.store),
        model_checks.model(up.model),
        model_checks.tokenizer(up.model),
        model_checks.adapters(up.model),
        model_size.size(up.model),
        machine_checks.cpu(),
        *native_checks.all_checks(),
        machine_checks.gpu(up.device),
        machine_checks.memory(),
        machine_checks.grpcurl(),
    ]
