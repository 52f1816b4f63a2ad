"""What `octavo generate` and `octavo chat` have in common: flags of sampling, and what they say of an answer."""

import argparse
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

from octavo.cli import output
from octavo.client import Client, Completion, Logprobs, Output, TokenLogprob
from octavo.request.errors import ServingError
from octavo.request.limits import DEFAULT_MAX_TOKENS
from octavo.request.sampling import PARAMETERS, FinishReason, SamplingArguments

QUEUE_INTERVAL_S = 3.0  # between two questions whether a request still waits
END_S = 1.0  # how long a question may delay the command's end


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each parameter that people often use. The model may recommend values for those left out."""
    group = parser.add_argument_group("sampling", "What a model recommends counts before these defaults.")
    for row in PARAMETERS.values():
        if row.flag is None:
            continue
        flag = "--" + row.name.replace("_", "-")
        if row.is_flag:
            group.add_argument(flag, action="store_true", default=None, help=row.what)
        elif row.allowed is None:
            group.add_argument(flag, action="append", default=None, metavar=row.flag, help=row.what)
        else:
            kind, left_out = int if row.allowed.integer else float, row.left_out or format(row.default, "g")
            text = f"{row.what} [default: {left_out}]"
            group.add_argument(flag, type=kind, default=None, metavar=row.flag, help=text)


def sampling_of(args: argparse.Namespace) -> SamplingArguments:
    """The parameters that the command line names, for Client.generate. The router fills in what is left out."""
    names = [name for name in PARAMETERS if getattr(args, name, None) is not None]
    return cast("SamplingArguments", {name: getattr(args, name) for name in names})


@contextmanager
def queue_notice(command: str, client: Client, request_id: str) -> Iterator[None]:
    """Inside the context, stderr is told each time the request waits in the queue for longer than a moment."""
    over = threading.Event()
    watching = (command, client, request_id, over)
    thread = threading.Thread(target=_watch_queue, args=watching, name="queue-notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_S)


def _watch_queue(command: str, client: Client, request_id: str, over: threading.Event) -> None:
    told = False
    while not over.wait(QUEUE_INTERVAL_S):
        try:
            waits = client.get(request_id).state == "QUEUED"
        except (ServingError, CancelledError, RuntimeError):  # the call itself tells; or the client is closed
            continue
        if waits and not told and not over.is_set():
            text = f"request {request_id} waits in the queue: no worker has taken it"
            output.print_error(command, f"{text}; `octavo status` says why, and Ctrl-C gives the request up")
        told = waits


def print_notes(command: str, outputs: Iterable[Output], arguments: SamplingArguments) -> None:
    """Says on stderr in which ways branches were cut, and whether there are tokens without text."""
    branches = list(outputs)
    found = {_note(each.finish_reason, len(each.token_ids), arguments.get("max_tokens")) for each in branches}
    if any(each.token_ids and not each.text for each in branches):
        found.add("the answer has tokens but no text: --json prints the token ids")
    for note in sorted(filter(None, found)):
        output.print_error(command, note)


def _note(reason: FinishReason, num_tokens: int, max_tokens: int | None) -> str:
    if reason == FinishReason.LENGTH:
        if max_tokens is None:
            whose = "the default" if num_tokens == DEFAULT_MAX_TOKENS else "the model's own limit or its context"
            return f"cut at {num_tokens} tokens, {whose}; --max-tokens sets another limit"
        if num_tokens < max_tokens:
            return f"cut after {num_tokens} tokens, where the model's context ends"
        return f"cut at max_tokens={max_tokens}; --max-tokens raises it"
    if reason == FinishReason.DEADLINE:
        return "cut at the deadline; --deadline raises it"
    return "cut: the request was cancelled" if reason == FinishReason.CANCELLED else ""


def token_table(branch: Output, client: Client, model: str | None) -> str:
    """Each token of a branch, its log probability, and its alternatives. A token without a text is shown by its id."""
    found = [*(item.chosen for item in branch.logprobs), *(other for item in branch.logprobs for other in item.top)]
    texts: dict[int, str] = {}
    try:
        for each in sorted({candidate.token_id for candidate in found}):
            texts[each] = repr(client.detokenize([each], model=model, skip_special_tokens=False))
    except ServingError:  # a router that cannot say it
        texts = {}

    def shown(candidate: TokenLogprob) -> str:
        return texts.get(candidate.token_id) or f"#{candidate.token_id}"

    rows = []
    for item in branch.logprobs:
        others = ", ".join(f"{shown(other)} {other.logprob:.3f}" for other in item.top)
        rows.append([item.chosen.token_id, shown(item.chosen), f"{item.chosen.logprob:.3f}", others])
    return output.table(["id", "token", "logprob", "likeliest"], rows)


def completion_json(completion: Completion) -> dict[str, Any]:
    """The completion as one object: the first branch at the top, and all branches in `outputs` if there are several."""
    outputs = [
        {
            "index": branch.index,
            "text": branch.text,
            "token_ids": list(branch.token_ids),
            "finish_reason": branch.finish_reason.name,
            **({"logprobs": [_logprobs(item) for item in branch.logprobs]} if branch.logprobs else {}),
        }
        for branch in completion.outputs
    ]
    return {
        "request_id": completion.request_id,
        **{name: value for name, value in outputs[0].items() if name != "index"},
        "usage": asdict(completion.usage),
        "num_reattaches": completion.num_reattaches,
        **({"outputs": outputs} if len(outputs) > 1 else {}),
    }


def _logprobs(item: Logprobs) -> dict[str, Any]:
    return {"chosen": asdict(item.chosen), "top": [asdict(candidate) for candidate in item.top]}
