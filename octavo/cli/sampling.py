"""The flags of `generate` and `chat` for sampling parameters."""

import argparse
from typing import cast

from octavo.client.arguments import SamplingArguments
from octavo.sampling import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each parameter that people often use. The model recommends values for those left out."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in (
        ("max_tokens", int, "output tokens at most"),
        ("temperature", float, "0 is greedy"),
        ("top_p", float, "keeps the likeliest tokens up to this probability"),
        ("top_k", int, "keeps this many likeliest tokens"),
        ("min_p", float, "drops tokens less likely than this times the likeliest"),
        ("seed", int, "makes sampling repeatable"),
        ("repetition_penalty", float, "above 1: avoids tokens that were there"),
    ):
        group.add_argument("--" + name.replace("_", "-"), type=kind, default=None, metavar=name[-1].upper(), help=text)
    group.add_argument("--stop", action="append", default=None, metavar="TEXT", help="ends the text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="goes on after the model's end token")


def from_args(args: argparse.Namespace) -> SamplingArguments:
    """The parameters that the command line names, for Client.generate. The router fills in what is left out."""
    names = [name for name in SamplingParams.__dataclass_fields__ if getattr(args, name, None) is not None]
    return cast("SamplingArguments", {name: getattr(args, name) for name in names})
