"""`octavo key new TENANT`: an API key, printed once, and the line that lets it in.

    octavo key new acme                     prints the key and the line
    octavo key new acme --file keys.txt     adds the line to the file, which routers with --api-keys keys.txt read again

Only the line, which holds a hash, is kept. To withdraw a key, remove its line.
"""

import argparse
import os
from pathlib import Path

from octavo.cli import output
from octavo.cli.command_error import CommandError
from octavo.security.api_keys import ApiKeyError, line_of, new_key, require_tenant


class KeyCommandError(CommandError):
    """No key was made. The message says why, and what to do."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "key",
        help="make an API key of a tenant",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("new",), help="what to do")
    parser.add_argument("tenant", metavar="TENANT", help="whose key it is")
    parser.add_argument("--file", type=Path, metavar="FILE", help="file of keys to add the line to")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        require_tenant(args.tenant)
    except ApiKeyError as error:
        raise KeyCommandError(str(error)) from None
    key = new_key()
    line = line_of(args.tenant, key)
    if args.file is not None:
        _add_line(args.file.expanduser(), line)
    if args.json:
        output.print_json({"tenant": args.tenant, "key": key, "line": line})
        return 0
    print(f"key    {key}")
    print(f"line   {line}")
    where = f"the line is in {args.file}" if args.file else "put the line into the file of --api-keys"
    print(f"\nThe key is shown this once: keep it in a file of mode 600. {where[0].upper()}{where[1:]}.")
    return 0


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
        raise KeyCommandError(f"--file {file}: {error.strerror}") from None
