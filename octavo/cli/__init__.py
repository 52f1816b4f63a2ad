"""The command line. `main` runs the program `octavo`."""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 130 if Ctrl-C ends it, also while its modules are being loaded."""
    try:
        from octavo.cli import commands

        return commands.main(argv)
    except KeyboardInterrupt:
        return 130
