"""The command line. `main` is the program `octavo`."""

from octavo.cli.commands import main

__all__ = ["main"]
