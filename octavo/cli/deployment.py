"""Finds the deployment that a command calls: that of --endpoint, or the `octavo up` on the state directory."""

import argparse
from pathlib import Path

from octavo.cli import state
from octavo.cli.command_error import CommandError
from octavo.endpoint import parse_cells, parse_targets
from octavo.errors import InvalidArgument


class NoDeploymentError(CommandError):
    """There is no deployment to call. The message says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT[,...][;...]",
        help="routers to call, with a semicolon between cells [those of the `octavo up` that runs here]",
    )
    add_state_dir(parser)


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="the state directory of `octavo up` [~/.local/state/octavo]")


def add_admin_arguments(parser: argparse.ArgumentParser) -> None:
    add_state_dir(parser)
    parser.add_argument("--admin-endpoint", metavar="HOST:PORT[,...]", help="admin listeners of the routers to ask")


def directory(args: argparse.Namespace) -> Path:
    return state.directory_of(args.state_dir)


def running(args: argparse.Namespace, other_flag: str) -> state.ClusterState:
    """The `octavo up` on the state directory. Raises NoDeploymentError, which names the flag that does without one."""
    found = state.read(directory(args))
    if found is None:
        text = f"no `octavo up` runs on {directory(args)}: start one, or say where with --state-dir"
        raise NoDeploymentError(f"{text}, or name routers with {other_flag}")
    return found


def endpoints(args: argparse.Namespace) -> tuple[tuple[str, ...], ...]:
    """The routers of each cell. Raises InvalidArgument, which names the flag, the cell and what would be right."""
    if not args.endpoint:
        return (tuple(running(args, "--endpoint").endpoints),)
    try:
        return parse_cells(args.endpoint)
    except ValueError as error:
        raise InvalidArgument("--endpoint", str(error)) from None


def split_endpoints(flag: str, text: str) -> list[str]:
    """The endpoints that a flag names. Raises InvalidArgument, which names the flag and what would be right."""
    try:
        return list(parse_targets(text))
    except ValueError as error:
        raise InvalidArgument(flag, str(error)) from None
