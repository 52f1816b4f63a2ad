"""The parser of every command line: one-line errors with the closest word, and help that shows groups and defaults."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from octavo.request.errors import closest

FLAG_COLUMNS = 32  # of a help: the text of longer flags begins on the next line
USAGE = "%(prog)s [SETTING ...]"  # of programs with many settings
_VALUE_OF_SWITCH = re.compile(r"argument (\S+): ignored explicit argument .*", re.DOTALL)
_REQUIRED = re.compile(r"the following arguments are required: (.*)", re.DOTALL)
_SWITCH_WORDS = ("yes", "no", "on", "off", "true", "false")


class CommandParser(argparse.ArgumentParser):
    """An argparse parser without abbreviations. What is wrong ends the program with one line and status 2."""

    def __init__(self, **options: Any) -> None:
        self.chosen: Mapping[str, str] = {}  # flags that only look as if they belonged here, and what to do instead
        options.setdefault("formatter_class", ReadableHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        if match := _VALUE_OF_SWITCH.fullmatch(message):
            on, _, off = match[1].partition("/")
            message = f"{on} takes no value: give {f'{on} or {off}' if off else 'it, or leave it out'}"
        if match := _REQUIRED.fullmatch(message):
            message = "; ".join(f"{name} is missing: {self._meaning(name)}" for name in match[1].split(", "))
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")

    def _meaning(self, name: str) -> str:
        """What an argument stands for; of an action, which there are."""
        action = next(
            each for each in self._actions if name in (each.metavar, "/".join(each.option_strings), each.dest)
        )
        return f"give {', '.join(action.choices)}" if action.choices else str(action.help)

    def of_action(self, args: argparse.Namespace) -> "CommandParser":
        """The parser of the command, or of the action of a command, that was chosen."""
        for each in self._actions:
            if isinstance(each, argparse._SubParsersAction):
                found: CommandParser = each.choices[getattr(args, each.dest)]
                return found.of_action(args)
        return self

    def refuse(self, unknown: Sequence[str]) -> None:
        """Ends the program if there are words that no argument has taken. The message has the closest flag."""
        if unknown:
            flags = [
                text for action in self._actions for text in action.option_strings if action.help != argparse.SUPPRESS
            ]
            name = unknown[0].split("=")[0]
            if name in self.chosen:
                self.error(f"`{self.prog}` chooses {name} for each process; {self.chosen[name]}")
            longer = [flag for flag in flags if name.startswith("--") and flag.endswith(name[1:])]
            hint = closest(longer[0] if len(longer) == 1 else name, flags)
            if name.lower() in _SWITCH_WORDS:
                hint = "; a switch takes no value: --NAME turns it on, --no-NAME off"
            elif not hint and not name.startswith("-"):
                takes_texts = any(not action.option_strings for action in self._actions)
                if takes_texts and " " not in name:
                    hint = "; a text with spaces needs quotes"
                else:
                    hint = f"; it takes no text here{', and --model names a model' if '--model' in flags else ''}"
            self.error(f"no such argument: {unknown[0]}{hint}")


class ReadableHelpFormatter(argparse.HelpFormatter):
    """Leaves room for long flags, and keeps the line breaks of the texts above and below them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=FLAG_COLUMNS)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(indent + line for line in text.strip().splitlines(keepends=True))
