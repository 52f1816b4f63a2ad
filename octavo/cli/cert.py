"""`octavo cert`: an authority for development, and certificates of all roles, in one folder.

    octavo cert ~/octavo-tls --host gpu-1.example --host 10.0.0.7

The files are readable by this user alone. A second call keeps the authority, and without --host the names, and
replaces the certificates: programs that run use the new ones for new connections. For production let cert-manager or
your own authority sign, as docs/security.md says.
"""

import argparse
from pathlib import Path
from types import ModuleType

from octavo.local.certificate_files import LIFE_DAYS, CertificateError, certificate_files
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError

MAX_DAYS = 3650


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("cert", help="make certificates of all roles, for development", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write them; it is made if need be")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="a name or address at which others call routers and workers, beside this machine's; may be repeated",
    )
    parser.add_argument(
        "--days", type=int, default=LIFE_DAYS, metavar="N", help="how long they are valid [default: %(default)s]"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.days <= MAX_DAYS:
        raise CommandError(f"--days {args.days}: must be 1 to {MAX_DAYS}")
    folder = args.folder.expanduser().absolute()
    try:
        development_ca().make_certificates(folder, args.host, args.days)
    except ValueError as error:
        raise CommandError(f"--host: {error}") from None
    print(f"certificates of {', '.join(PeerRole)} are in {folder}, valid for {args.days} days\n")
    for role in (PeerRole.ROUTER, PeerRole.WORKER):
        print(f"  octavo {role} {_flags(folder, role)}")
    print(f"  octavo generate {_flags(folder, PeerRole.CLIENT)}")
    print(f"  octavo status {_flags(folder, PeerRole.OPERATOR)}")
    print(f"  {grpcurl_flags(folder)}\n")
    print("ca.key can sign certificates of any role: keep it off the machines that only serve.")
    return 0


def development_ca() -> ModuleType:
    """The module of that name. Raises CertificateError if the package that it needs is not installed."""
    try:
        from octavo.local import development_ca
    except ImportError:
        raise CertificateError("making certificates needs a package: pip install 'octavo[certificates]'") from None
    return development_ca


def grpcurl_flags(folder: Path) -> str:
    """The beginning of a grpcurl command of a client."""
    cert, key, ca = certificate_files(folder, PeerRole.CLIENT)
    return f"grpcurl -cacert {ca} -cert {cert} -key {key}"


def _flags(folder: Path, role: PeerRole) -> str:
    cert, key, ca = certificate_files(folder, role)
    return f"--tls-cert {cert} --tls-key {key} --tls-ca {ca}"
