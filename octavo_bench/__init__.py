"""`octavo bench`: a load generator for octavo and for servers with OpenAI's interface."""

from octavo_bench.command import add_parser

__all__ = ["add_parser"]
