"""The flags of `generate` and `chat` for sampling parameters."""

import argparse
from typing import cast

from octavo.client.arguments import SamplingArguments
from octavo.request.limits import DEFAULT_MAX_TOKENS
from octavo.request.sampling import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each parameter that people often use. The model may recommend values for those left out."""
    group = parser.add_argument_group("sampling", "What a model recommends counts before these defaults.")
    defaults = SamplingParams()
    for name, kind, metavar, text in (
        ("max_tokens", int, "TOKENS", f"output at most [default: {DEFAULT_MAX_TOKENS}, or what fits into the context]"),
        ("temperature", float, "T", "how evenly tokens are drawn; 0: always the likeliest token"),
        ("top_p", float, "P", "draws from the likeliest tokens that make up this probability, 0 to 1"),
        ("top_k", int, "N", "draws from this many likeliest tokens; 0: from all"),
        ("min_p", float, "P", "never draws a token less likely than this times the likeliest"),
        ("seed", int, "N", "makes the answer repeatable"),
        ("repetition_penalty", float, "X", "above 1: avoids tokens that were there"),
    ):
        default = getattr(defaults, name)
        text += f" [default: {default:g}]" if default is not None else ""
        group.add_argument("--" + name.replace("_", "-"), type=kind, default=None, metavar=metavar, help=text)
    group.add_argument(
        "--stop",
        action="append",
        default=None,
        metavar="TEXT",
        help="ends the answer where it comes; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="goes on after the model's end token")


def from_args(args: argparse.Namespace) -> SamplingArguments:
    """The parameters that the command line names, for Client.generate. The router fills in what is left out."""
    names = [name for name in SamplingParams.__dataclass_fields__ if getattr(args, name, None) is not None]
    return cast("SamplingArguments", {name: getattr(args, name) for name in names})
