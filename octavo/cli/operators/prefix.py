"""`octavo prefix`: names the beginning of many prompts, which workers then keep in their caches.

    octavo prefix add support FILE                the text of FILE is the system message of chats
    octavo prefix add law FILE --text             it begins prompts that are no chats
    octavo prefix add support FILE --workers 2    it stays on two workers, instead of on all
    octavo prefix list                            where they are warm, and how many requests began so
    octavo prefix remove support

A request begins with it if its messages do, or if it has `prefix: support`. FILE may be -, for stdin. What is kept is
evicted last, and half of a worker's blocks at most are kept.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from octavo.cli import connection, output
from octavo.process.command_error import CommandError
from octavo.v1 import admin_pb2

MAX_WORKERS = 10_000
COLUMNS = ("NAME", "MODEL", "TENANT", "KIND", "TOKENS", "WORKERS", "WARM ON", "REQUESTS")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("prefix", help="keep the beginning of many prompts warm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = actions.add_parser("add", help="name a text, and have workers keep it")
    add.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes and underscores")
    add.add_argument("file", metavar="FILE", help="a file with the text; - is stdin")
    add.add_argument("--text", action="store_true", help="the text begins prompts that are no chats")
    text = "on how many workers it stays [all of the model]"
    add.add_argument("--workers", type=_count, default=0, metavar="NUMBER", help=text)
    remove = actions.add_parser("remove", help="forget a name; its blocks are evicted like others")
    remove.add_argument("name", metavar="NAME", help="a name in `octavo prefix list`")
    for each in (add, remove):
        each.add_argument("--model", metavar="MODEL", help="a name in `octavo status` [the only model]")
        each.add_argument("--tenant", default="", metavar="TENANT", help="for whose requests, where there are API keys")
    listing = actions.add_parser("list", help="show all, and where they are warm")
    for each, run in ((add, run_add), (remove, run_remove), (listing, run_list)):
        connection.add_admin_arguments(each, run)


def run_add(args: argparse.Namespace) -> int:
    request = admin_pb2.AddPrefixRequest(
        name=args.name, model=args.model, tenant=args.tenant, workers=args.workers, **{_kind(args): _text(args.file)}
    )

    prefix = connection.ask_routers(args, lambda admin: admin.AddPrefix(request)).prefix
    if args.json:
        output.print_json(_fields(prefix))
    else:
        where = f"{prefix.workers} workers" if prefix.workers else "all workers"
        print(f"{prefix.name}: {prefix.num_tokens} tokens, to stay warm on {where} of {prefix.model}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    request = admin_pb2.RemovePrefixRequest(name=args.name, model=args.model, tenant=args.tenant)
    connection.ask_routers(args, lambda admin: admin.RemovePrefix(request))
    print(f"{args.name} is forgotten") if not args.json else output.print_json({"name": args.name})
    return 0


def run_list(args: argparse.Namespace) -> int:
    listed = connection.ask_routers(args, lambda admin: admin.ListPrefixes(admin_pb2.ListPrefixesRequest()))
    prefixes = [_fields(each) for each in listed.prefixes]
    rows = [_row(each) for each in prefixes]
    output.print_list(prefixes, rows, COLUMNS, "no prefix has a name: octavo prefix add NAME FILE", as_json=args.json)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"a number from 1 to {MAX_WORKERS}")
    return int(text)


def _kind(args: argparse.Namespace) -> str:
    return "text" if args.text else "system"


def _text(file: str) -> str:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        text.encode()  # fails for what stdin had beside UTF-8
    except OSError as error:
        raise CommandError(f"FILE: {file}: {error.strerror}; name a file with the text, or - for stdin") from None
    except UnicodeError:
        raise CommandError(f"FILE: {file} is no text in UTF-8; convert it") from None
    return text


def _fields(prefix: admin_pb2.NamedPrefix) -> dict[str, Any]:
    plain = {
        name: getattr(prefix, name) for name in ("name", "model", "tenant", "num_tokens", "workers", "num_requests")
    }
    kind = "system" if prefix.is_system else "text"
    return {**plain, "kind": kind, "warm_on": list(prefix.warm_on), "full_on": list(prefix.full_on)}


def _row(prefix: dict[str, Any]) -> list[object]:
    warm = ", ".join(prefix["warm_on"]) or "-"
    if prefix["full_on"]:
        warm += f" (no room on {', '.join(prefix['full_on'])})"
    plain = [prefix["name"], prefix["model"], prefix["tenant"] or "-", prefix["kind"], prefix["num_tokens"]]
    return [*plain, prefix["workers"] or "all", warm, prefix["num_requests"]]
