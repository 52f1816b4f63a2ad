"""`octavo adapter`: names low-rank adapters, which requests then ask for as they ask for a model.

    octavo adapter add poems /srv/adapters/poems    the folder that PEFT wrote, or a GGUF file of llama.cpp;
                                                    all routers and workers read this path
    octavo adapter list                             which there are, and which workers have them in memory
    octavo adapter remove poems

A name that is there gets the new adapter; requests that were accepted before go on with the old one, as long as a
worker has it.
"""

import argparse
from pathlib import Path
from typing import Any

from octavo.cli import connection, output
from octavo.v1 import admin_pb2

COLUMNS = ("NAME", "MODEL", "RANK", "BYTES", "DIGEST", "LOADED ON", "FOLDER")
FIELDS = ("name", "model", "digest", "source", "rank", "num_bytes", "num_workers")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("adapter", help="name low-rank adapters", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = actions.add_parser("add", help="name an adapter, or give a name another one")
    add.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes and underscores")
    add.add_argument("path", metavar="PATH", help="its folder or GGUF file, which the router and all workers can read")
    add.add_argument("--model", metavar="MODEL", help="a name in `octavo status` [the only model]")
    remove = actions.add_parser("remove", help="forget a name; requests that run go on")
    remove.add_argument("name", metavar="NAME", help="a name in `octavo adapter list`")
    listing = actions.add_parser("list", help="show all, and where they are in memory")
    for each, run in ((add, run_add), (remove, run_remove), (listing, run_list)):
        connection.add_admin_arguments(each, run)


def run_add(args: argparse.Namespace) -> int:
    source = str(Path(args.path).expanduser().absolute())
    request = admin_pb2.AddAdapterRequest(name=args.name, source=source, model=args.model)

    adapter = connection.ask_routers(args, lambda admin: admin.AddAdapter(request)).adapter
    if args.json:
        output.print_json(_fields(adapter))
    else:
        what = f"rank {adapter.rank}, {adapter.num_bytes} bytes, digest {adapter.digest}"
        print(f"{adapter.name}: an adapter of {adapter.model}, {what}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    request = admin_pb2.RemoveAdapterRequest(name=args.name)
    connection.ask_routers(args, lambda admin: admin.RemoveAdapter(request))
    print(f"{args.name} is forgotten") if not args.json else output.print_json({"name": args.name})
    return 0


def run_list(args: argparse.Namespace) -> int:
    listed = connection.ask_routers(args, lambda admin: admin.ListAdapters(admin_pb2.ListAdaptersRequest()))
    adapters = [_fields(each) for each in listed.adapters]
    rows = [_row(each) for each in adapters]
    output.print_list(adapters, rows, COLUMNS, "no adapter has a name: octavo adapter add NAME PATH", as_json=args.json)
    return 0


def _fields(adapter: admin_pb2.Adapter) -> dict[str, Any]:
    return {**{name: getattr(adapter, name) for name in FIELDS}, "loaded_on": list(adapter.loaded_on)}


def _row(adapter: dict[str, Any]) -> list[object]:
    where = ", ".join(adapter["loaded_on"]) or "-"
    model = adapter["model"] if adapter["num_workers"] else f"{adapter['model']} (no worker)"
    return [
        adapter["name"],
        model,
        *(adapter[name] for name in ("rank", "num_bytes", "digest")),
        where,
        adapter["source"],
    ]
