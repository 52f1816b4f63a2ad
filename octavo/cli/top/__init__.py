"""`octavo top`: the state of the cluster in a terminal."""

from octavo.cli.top.command import add_parser

__all__ = ["add_parser"]
