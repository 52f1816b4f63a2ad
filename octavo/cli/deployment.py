"""Finds the deployment that a command calls: that of --endpoint, or the `octavo up` on the state directory."""

import argparse
from dataclasses import replace
from pathlib import Path

from octavo.local import state
from octavo.local.certificate_files import certificate_files
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError
from octavo.request.errors import InvalidArgument
from octavo.settings.client import ClientSettings
from octavo.settings.loading import from_args
from octavo.settings.setting_sources import add_arguments as add_setting_arguments
from octavo.wire.endpoint import parse_cells, parse_targets
from octavo.wire.tls import ClientCredentials, TlsError, TlsFiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT[,...][;...]",
        help="routers to call, with a semicolon between cells [those of the `octavo up` that runs here]",
    )
    add_state_dir(parser)
    add_setting_arguments(parser, ClientSettings)


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="the state directory of `octavo up` [~/.local/state/octavo]")


def add_admin_arguments(parser: argparse.ArgumentParser) -> None:
    add_state_dir(parser)
    parser.add_argument("--admin-endpoint", metavar="HOST:PORT[,...]", help="admin listeners of the routers to ask")
    add_setting_arguments(parser, ClientSettings)


def admin_endpoints(args: argparse.Namespace) -> list[str]:
    """The admin listeners of --admin-endpoint, or of the `octavo up` that runs here."""
    if args.admin_endpoint:
        return split_endpoints("--admin-endpoint", args.admin_endpoint)
    return [router.admin_endpoint for router in running(args, "--admin-endpoint").routers]


def directory(args: argparse.Namespace) -> Path:
    return state.directory_of(args.state_dir)


def running(args: argparse.Namespace, other_flag: str) -> state.ClusterState:
    """The `octavo up` on the state directory. Raises CommandError, which names the flag that does without one."""
    found = state.read(directory(args))
    if found is None:
        text = f"no `octavo up` runs on {directory(args)}: start one, or say where with --state-dir"
        raise CommandError(f"{text}, or name routers with {other_flag}")
    return found


def credentials(args: argparse.Namespace, role: PeerRole) -> ClientCredentials:
    """How the command shows who it is. Where the flags say nothing: by the certificate that `octavo up --secure` made.

    Raises CommandError.
    """
    given = from_args(ClientSettings, args)
    try:
        found = credentials_of(given)
        if found.tls is None and not (getattr(args, "endpoint", None) or getattr(args, "admin_endpoint", None)):
            current = state.read(directory(args))
            if current is not None and current.tls:
                named = certificate_files(Path(current.tls), role)
                given = replace(given, **dict(zip(("tls_cert", "tls_key", "tls_ca"), named, strict=True)))
                found = credentials_of(given)
    except TlsError as error:
        raise CommandError(str(error)) from None
    return found


def credentials_of(settings: ClientSettings) -> ClientCredentials:
    """What the settings say. Raises TlsError."""
    key = _read_key(settings.api_key_file) if settings.api_key_file else ""
    tls = None
    if settings.tls_cert or settings.tls_key or settings.tls_ca:
        tls = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
    return ClientCredentials(tls, settings.tls_server_name, key)


def _read_key(file: str) -> str:
    try:
        key = Path(file).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not ASCII"
        raise TlsError(f"--api-key-file {file}: {reason}") from None
    if not key or any(each.isspace() for each in key):
        raise TlsError(f"--api-key-file {file}: must hold one key, and nothing else")
    return key


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
