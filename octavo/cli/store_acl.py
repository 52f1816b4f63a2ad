"""`octavo store-acl`: the line by which a store's user may call octavo's functions, and nothing else.

octavo store-acl --password-file FILE >> users.acl        then ACL LOAD, or aclfile users.acl
octavo store-acl --setuser                                as rules of ACL SETUSER, without a password
"""

import argparse
import re
from pathlib import Path

from octavo.process.command_error import CommandError
from octavo.store import library


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("store-acl", help="print the rights that a store's user needs", description=__doc__)
    parser.add_argument("--user", default="octavo", metavar="NAME", help="the user's name [default: %(default)s]")
    parser.add_argument("--password-file", type=Path, metavar="FILE", help="file that holds the user's password")
    parser.add_argument("--setuser", action="store_true", help="print the rules for ACL SETUSER instead")
    parser.add_argument("--replicas", action="store_true", help="with the rights that --store-replicas needs")
    parser.add_argument(
        "--no-load", dest="load", action="store_false", help="without the right to load the function library"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.setuser:
        print(" ".join(library.user_rules(replicas=args.replicas, load=args.load)))
        return 0
    if args.password_file is None:
        raise CommandError("give --password-file FILE, or --setuser for the rules alone")
    if not re.fullmatch(r"[\w.-]{1,64}", args.user):
        raise CommandError("--user: letters, digits, dots, hyphens and underscores, up to 64")
    try:
        password = args.password_file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise CommandError(f"--password-file {args.password_file}: {reason}") from None
    if not password:
        raise CommandError(f"--password-file {args.password_file}: is empty")
    print(library.user_line(args.user, password, replicas=args.replicas, load=args.load))
    return 0
