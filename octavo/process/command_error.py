"""The errors of commands that are told in one line."""


class CommandError(Exception):
    """What a command cannot do. The message, one line, says why and what to do."""
