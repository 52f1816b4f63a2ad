"""The flags of `generate` and `chat` for sampling parameters."""

import argparse
from typing import cast

from octavo.request.sampling import PARAMETERS, Parameter, SamplingArguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each parameter that people often use. The model may recommend values for those left out."""
    group = parser.add_argument_group("sampling", "What a model recommends counts before these defaults.")
    for row in PARAMETERS.values():
        if row.flag is None:
            continue
        flag = "--" + row.name.replace("_", "-")
        if row.is_flag:
            group.add_argument(flag, action="store_true", default=None, help=row.what)
        elif row.allowed is None:
            group.add_argument(flag, action="append", default=None, metavar=row.flag, help=row.what)
        else:
            kind = int if row.allowed.integer else float
            group.add_argument(flag, type=kind, default=None, metavar=row.flag, help=f"{row.what} [{_left_out(row)}]")


def _left_out(row: Parameter) -> str:
    return f"default: {row.left_out or format(row.default, 'g')}"


def from_args(args: argparse.Namespace) -> SamplingArguments:
    """The parameters that the command line names, for Client.generate. The router fills in what is left out."""
    names = [name for name in PARAMETERS if getattr(args, name, None) is not None]
    return cast("SamplingArguments", {name: getattr(args, name) for name in names})
