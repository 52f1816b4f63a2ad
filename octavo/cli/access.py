"""Who may call: `octavo cert`, `octavo key` and `octavo store-acl` make certificates, keys and rights of the store."""

import argparse
import re
import sys
import time
from pathlib import Path
from types import ModuleType

from octavo.cli import output
from octavo.cli.deployment import read_secret
from octavo.local.certificate_files import LIFE_DAYS, CertificateError, certificate_files
from octavo.local.state import replace_file
from octavo.net.security.api_keys import ApiKeyError, line_of, new_key, parse_time, require_tenant, time_text
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError
from octavo.request.limits import MAX_STREAMS, MAX_TOKENS_PER_MINUTE, TenantQuota
from octavo.store import library

CERT = """`octavo cert`: an authority for development, and certificates of all roles, in one folder.

    octavo cert ~/octavo-tls --host gpu-1.example --host 10.0.0.7

The files are readable by this user alone. A second call keeps the authority, and without --host the names, and
replaces the certificates: programs that run use the new ones for new connections. For production let cert-manager or
your own authority sign, as docs/security.md says.
"""
KEY = """`octavo key new TENANT`: an API key, printed once, and the line that lets it in.

    octavo key new acme                     prints the key and the line
    octavo key new acme --file keys.txt     adds the line to the file, which routers with --api-keys keys.txt read again
    octavo key new acme --expires 30d       a key that is refused after 30 days (also 12h, or a day: 2027-01-31)
    octavo key new acme --quiet --file keys.txt > acme.key      prints the key alone

Only the line, which holds a hash, is kept. To withdraw a key, remove its line.
"""
STORE_ACL = """`octavo store-acl`: the line by which a store's user may call octavo's functions, and nothing else.

octavo store-acl --password-file FILE >> users.acl        then ACL LOAD, or aclfile users.acl
octavo store-acl --setuser                                as rules of ACL SETUSER, without a password
"""
MAX_CERTIFICATE_DAYS = 3650
MAX_KEY_DAYS = 36_500
UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    cert = commands.add_parser("cert", help="make certificates of all roles, for development", description=CERT)
    cert.add_argument("folder", metavar="DIR", type=Path, help="where to write them; it is made if need be")
    text = "a name or address at which others call routers and workers, beside this machine's; may be repeated"
    cert.add_argument("--host", action="append", default=[], metavar="HOST", help=text)
    text = "how long they are valid [default: %(default)s]"
    cert.add_argument("--days", type=int, default=LIFE_DAYS, metavar="N", help=text)
    cert.set_defaults(run=make_certificates)

    key = commands.add_parser("key", help="make an API key of a tenant", description=KEY)
    key.add_argument("action", choices=("new",), help="what to do")
    key.add_argument("tenant", metavar="TENANT", help="whose key it is")
    key.add_argument("--file", type=Path, metavar="FILE", help="file of keys to add the line to")
    text = "when the key ends: 30d, 12h, 90m, 2w, or a day: 2027-01-31"
    key.add_argument("--expires", default="", metavar="TIME", help=text)
    text = "requests of the tenant under way at once"
    key.add_argument("--max-streams", type=int, default=0, metavar="N", help=text)
    text = "tokens of its prompts and outputs in a minute"
    key.add_argument("--tokens-per-minute", type=int, default=0, metavar="N", help=text)
    key.add_argument("--quiet", action="store_true", help="print the key alone; without --file its line to stderr")
    key.add_argument("--json", action="store_true", help="print one object")
    key.set_defaults(run=make_key)

    rights = commands.add_parser("store-acl", help="print the rights that a store's user needs", description=STORE_ACL)
    rights.add_argument("--user", default="octavo", metavar="NAME", help="the user's name [default: %(default)s]")
    rights.add_argument("--password-file", metavar="FILE", help="file that holds the user's password")
    rights.add_argument("--setuser", action="store_true", help="print the rules for ACL SETUSER instead")
    rights.add_argument("--replicas", action="store_true", help="with the rights that --store-replicas needs")
    text = "without the right to load the function library"
    rights.add_argument("--no-load", dest="load", action="store_false", help=text)
    rights.set_defaults(run=print_rights)


def make_certificates(args: argparse.Namespace) -> int:
    if not 1 <= args.days <= MAX_CERTIFICATE_DAYS:
        raise CommandError(f"--days {args.days}: must be 1 to {MAX_CERTIFICATE_DAYS}")
    folder = args.folder.expanduser().absolute()
    try:
        development_ca().make_certificates(folder, args.host, args.days)
    except ValueError as error:
        raise CommandError(f"--host: {error}") from None
    flags = {}
    for role in PeerRole:
        cert, key, ca = certificate_files(folder, role)
        flags[role] = f"--tls-cert {cert} --tls-key {key} --tls-ca {ca}"
    print(f"certificates of {', '.join(PeerRole)} are in {folder}, valid for {args.days} days\n")
    for role in (PeerRole.ROUTER, PeerRole.WORKER):
        print(f"  octavo {role} {flags[role]}")
    print(f"  octavo generate {flags[PeerRole.CLIENT]}")
    print(f"  octavo status {flags[PeerRole.OPERATOR]}")
    cert, key, ca = certificate_files(folder, PeerRole.CLIENT)
    print(f"  grpcurl -cacert {ca} -cert {cert} -key {key}\n")
    print("ca.key can sign certificates of any role: keep it off the machines that only serve.")
    return 0


def development_ca() -> ModuleType:
    """The module of that name. Raises CertificateError if the package that it needs is not installed."""
    try:
        from octavo.local import development_ca
    except ImportError:
        raise CertificateError("making certificates needs a package: pip install 'octavo[certificates]'") from None
    return development_ca


def make_key(args: argparse.Namespace) -> int:
    try:
        require_tenant(args.tenant)
    except ApiKeyError as error:
        raise CommandError(str(error)) from None
    quota = TenantQuota(
        _within("--max-streams", args.max_streams, MAX_STREAMS),
        _within("--tokens-per-minute", args.tokens_per_minute, MAX_TOKENS_PER_MINUTE),
    )
    key, expires_at = new_key(), _end_of(args.expires)
    line = line_of(args.tenant, key, expires_at, quota)
    if args.file is not None:
        _add_line(args.file.expanduser(), line)
    if args.json:
        until = {"expires": time_text(expires_at)} if expires_at else {}
        output.print_json({"tenant": args.tenant, "key": key, "line": line, **until})
        return 0
    if args.quiet:
        print(key)
        if args.file is None:
            print(line, file=sys.stderr)
        return 0
    print(f"key    {key}")
    print(f"line   {line}")
    if expires_at:
        print(f"until  {time_text(expires_at)}")
    where = f"The line is in {args.file}" if args.file else "Put the line into the file of --api-keys"
    print(f"\nThe key is shown this once: keep it in a file of mode 600. {where}.")
    return 0


def _within(flag: str, number: int, most: int) -> int:
    if not 0 <= number <= most:
        raise CommandError(f"{flag} {number}: must be from 0, which is no limit, to {most}")
    return number


def _end_of(text: str) -> float:
    """The seconds since 1970 at which a key ends; 0: never."""
    if not text:
        return 0.0
    now = time.time()
    found = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    try:
        end = now + int(found[1]) * UNITS_S[found[2]] if found else parse_time(text)
    except ValueError:
        end = -1.0
    if not now < end <= now + MAX_KEY_DAYS * UNITS_S["d"]:
        raise CommandError(f"--expires {text}: must be ahead, within a hundred years: 30d, 12h, 90m, 2w or 2027-01-31")
    return float(int(end))


def _add_line(file: Path, line: str) -> None:
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if before and not before.endswith("\n"):
            before += "\n"
        replace_file(file, f"{before}{line}\n".encode())
    except OSError as error:
        raise CommandError(f"--file {file}: {error.strerror}") from None


def print_rights(args: argparse.Namespace) -> int:
    if args.setuser:
        print(" ".join(library.user_rules(replicas=args.replicas, load=args.load)))
        return 0
    if args.password_file is None:
        raise CommandError("give --password-file FILE, or --setuser for the rules alone")
    if not re.fullmatch(r"[\w.-]{1,64}", args.user):
        raise CommandError("--user: letters, digits, dots, hyphens and underscores, up to 64")
    password = read_secret("--password-file", args.password_file)
    if not password:
        raise CommandError(f"--password-file {args.password_file}: is empty")
    print(library.user_line(args.user, password, replicas=args.replicas, load=args.load))
    return 0
