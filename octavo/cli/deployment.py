"""Finds the deployment that a command calls: that of --endpoint, or the `octavo up` on the state directory."""

import argparse
from pathlib import Path

from octavo.local import state
from octavo.local.certificate_files import certificate_files
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError
from octavo.request.errors import InvalidArgument
from octavo.settings.common import ClientSettings
from octavo.settings.loading import from_args, one_setting
from octavo.settings.setting_sources import add_arguments as add_setting_arguments
from octavo.settings.up import UpSettings
from octavo.wire.endpoint import parse_cells, parse_targets
from octavo.wire.tls import ClientCredentials, TlsError, TlsFiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "routers to call, with a semicolon between cells [those of the `octavo up` that runs here]"
    parser.add_argument("--endpoint", metavar="HOST:PORT[,...][;...]", help=text)
    add_state_dir(parser)
    add_credentials(parser)


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    text = "the state directory of `octavo up` [where it would be here: by OCTAVO_UP_STATE_DIR, or the config file]"
    parser.add_argument("--state-dir", metavar="DIR", help=text)


def state_directory(args: argparse.Namespace) -> Path:
    """The directory that --state-dir names, or the one that `octavo up` would use here. Raises CommandError."""
    return state.directory_of(one_setting(UpSettings, "state_dir", args.state_dir))


def add_credentials(parser: argparse.ArgumentParser) -> None:
    add_setting_arguments(parser, ClientSettings)


def admin_endpoints(args: argparse.Namespace) -> list[str]:
    """The admin listeners of --admin-endpoint, or of the `octavo up` that runs here. Raises InvalidArgument."""
    if not args.admin_endpoint:
        return [router.admin_endpoint for router in running(args, "--admin-endpoint").routers]
    try:
        return list(parse_targets(args.admin_endpoint))
    except ValueError as error:
        raise InvalidArgument("--admin-endpoint", str(error)) from None


def endpoints(args: argparse.Namespace) -> tuple[tuple[str, ...], ...]:
    """The routers of each cell. Raises InvalidArgument, which names the flag, the cell and what would be right."""
    if not args.endpoint:
        return (tuple(running(args, "--endpoint").endpoints),)
    try:
        return parse_cells(args.endpoint)
    except ValueError as error:
        raise InvalidArgument("--endpoint", str(error)) from None


def running(args: argparse.Namespace, other_flag: str) -> state.ClusterState:
    """The `octavo up` on the state directory. Raises CommandError, which names the flag that does without one."""
    directory = state_directory(args)
    found = state.read(directory)
    if found is None:
        text = f"no `octavo up` runs on {directory}: start one, or say where with --state-dir"
        raise CommandError(f"{text}, or name routers with {other_flag}")
    return found


def credentials(args: argparse.Namespace, role: PeerRole) -> ClientCredentials:
    """How the command shows who it is. Where the flags say nothing: by the certificate that `octavo up --secure` made.

    Raises CommandError.
    """
    given = from_args(ClientSettings, args)
    key = _api_key(given.api_key_file) if given.api_key_file else ""
    files: tuple[str, ...] = (given.tls_cert, given.tls_key, given.tls_ca)
    if not any(files) and not (getattr(args, "endpoint", None) or getattr(args, "admin_endpoint", None)):
        current = state.read(state_directory(args))
        if current is not None and current.tls:
            files = certificate_files(Path(current.tls), role)
    try:
        return ClientCredentials(TlsFiles(*files) if any(files) else None, given.tls_server_name, key)
    except TlsError as error:
        raise CommandError(str(error)) from None


def _api_key(file: str) -> str:
    key = read_secret("--api-key-file", file, "ascii")
    if not key or any(each.isspace() for each in key):
        raise CommandError(f"--api-key-file {file}: must hold one key, and nothing else")
    return key


def read_secret(flag: str, file: str, encoding: str = "utf-8") -> str:
    """The text of a file that a flag names. Raises CommandError."""
    try:
        return Path(file).expanduser().read_text(encoding=encoding).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is not {encoding.upper()}"
        raise CommandError(f"{flag} {file}: {reason}") from None
