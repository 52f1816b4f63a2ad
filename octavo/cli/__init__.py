"""The command line. `main` runs the program `octavo`."""

from octavo.cli.commands import main

__all__ = ["main"]
