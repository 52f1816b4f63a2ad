"""`octavo show REQUEST_ID`: what happened to a request, with times and workers, for ten minutes after its end.

    octavo show 4f0c

REQUEST_ID is what the client sent, or what its first event had. Every router of the deployment is asked: all know the
record, but when the prompt began to be computed and the first token was sent, only the router that sent it.
"""

import argparse
from contextlib import ExitStack
from dataclasses import asdict

from octavo.cli import connection, deployment, output
from octavo.client import Client, RequestEntry, RequestStatus
from octavo.net.security.roles import PeerRole
from octavo.request.errors import NotFound, ServingError

RECORD_ENTRIES = (
    *("queued", "taken", "requeued", "proved", "cancelled", "ended"),
    *("migrating", "migrated", "stayed", "numerics"),
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("show", help="show what happened to a request", description=__doc__)
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the request to show")
    deployment.add_arguments(parser)
    connection.add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = statuses(args)
    status, entries = found[0], joined_entries(found)
    if args.json:
        shown = {**asdict(status), "finish_reasons": [reason.name for reason in status.finish_reasons]}
        output.print_json({**shown, "timeline": [entry._asdict() for entry in entries]}, indent=2)
        return 0
    ends = ", ".join(reason.name.lower() for reason in status.finish_reasons if reason)
    print(f"{status.request_id}  {status.state}{f' ({ends})' if ends else ''}, epoch {status.epoch}")
    print(f"{status.usage.prompt_tokens} tokens of prompt, {sum(status.num_tokens)} of output")
    if status.lora:
        names = " or ".join(status.lora_names) or "an adapter that has no name any more"
        print(f"model {status.model} with {names}, digest {status.lora}")
    elif status.model:
        print(f"model {status.model}")
    if status.numerics:
        print(f"computed as {status.numerics}")
    if status.numerics_changes:
        times = "once" if status.numerics_changes == 1 else f"{status.numerics_changes} times"
        other = "without the fault its answer may have been another one"
        print(f"it went on in another class of numerics {times}: {other}")
    if status.failure is not None:
        print(f"{status.failure.reason}: {status.failure.message}")
    rows = [(entry.after_ms, entry.what, entry.worker, entry.detail) for entry in entries]
    print("\n" + output.table(("ms", "what", "worker", "detail"), rows))
    return 0


def statuses(args: argparse.Namespace) -> list[RequestStatus]:
    """What each router that knows the request says of it. Raises the error of the last one if none does."""
    found, error = [], None
    credentials = deployment.credentials(args, PeerRole.CLIENT)
    with ExitStack() as stack:
        endpoints = [endpoint for cell in deployment.endpoints(args) for endpoint in cell]
        stack.enter_context(connection.delayed_notice(args, endpoints))
        for endpoint in endpoints:
            client = stack.enter_context(Client(endpoint, credentials=credentials))
            try:
                client.connect(args.timeout)
                found.append(client.get(args.request_id))
            except ServingError as refusal:
                error = error if isinstance(error, NotFound) else refusal
    if not found and error is not None:
        raise error
    return found


def joined_entries(found: list[RequestStatus]) -> list[RequestEntry]:
    """The record's entries, which all tell alike, and what each router has seen beside them."""
    entries = list(found[0].timeline)
    for status in found[1:]:
        entries += [entry for entry in status.timeline if entry.what not in RECORD_ENTRIES]
    return sorted(entries, key=lambda entry: (entry.after_ms, entry.what == "ended"))
