"""`octavo key new TENANT`: an API key, printed once, and the line that lets it in.

    octavo key new acme                     prints the key and the line
    octavo key new acme --file keys.txt     adds the line to the file, which routers with --api-keys keys.txt read again
    octavo key new acme --expires 30d       a key that is refused after 30 days (also 12h, or a day: 2027-01-31)
    octavo key new acme --quiet --file keys.txt > acme.key      prints the key alone

Only the line, which holds a hash, is kept. To withdraw a key, remove its line.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

from octavo.cli import output
from octavo.net.security.api_keys import ApiKeyError, line_of, new_key, parse_time, require_tenant, time_text
from octavo.process.command_error import CommandError
from octavo.request.limits import MAX_STREAMS, MAX_TOKENS_PER_MINUTE, TenantQuota

UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
MAX_DAYS = 36_500


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("key", help="make an API key of a tenant", description=__doc__)
    parser.add_argument("action", choices=("new",), help="what to do")
    parser.add_argument("tenant", metavar="TENANT", help="whose key it is")
    parser.add_argument("--file", type=Path, metavar="FILE", help="file of keys to add the line to")
    parser.add_argument(
        "--expires", default="", metavar="TIME", help="when the key ends: 30d, 12h, 90m, 2w, or a day: 2027-01-31"
    )
    parser.add_argument(
        "--max-streams", type=int, default=0, metavar="N", help="requests of the tenant under way at once"
    )
    parser.add_argument(
        "--tokens-per-minute", type=int, default=0, metavar="N", help="tokens of its prompts and outputs in a minute"
    )
    parser.add_argument("--quiet", action="store_true", help="print the key alone; without --file its line to stderr")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
    where = f"the line is in {args.file}" if args.file else "put the line into the file of --api-keys"
    print(f"\nThe key is shown this once: keep it in a file of mode 600. {where[0].upper()}{where[1:]}.")
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
    if not now < end <= now + MAX_DAYS * UNITS_S["d"]:
        raise CommandError(f"--expires {text}: must be ahead, within a hundred years: 30d, 12h, 90m, 2w or 2027-01-31")
    return float(int(end))


def _add_line(file: Path, line: str) -> None:
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if before and not before.endswith("\n"):
            before += "\n"
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
            opened.write(f"{before}{line}\n")
        temporary.replace(file)
    except OSError as error:
        raise CommandError(f"--file {file}: {error.strerror}") from None
