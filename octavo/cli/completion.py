"""`octavo completion bash|zsh|fish`: a script by which a shell completes octavo's commands and flags.

bash: source <(octavo completion bash)
zsh:  source <(octavo completion zsh)
fish: octavo completion fish | source
"""

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
BASH = """_octavo() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _octavo octavo
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("completion", help="print a script for your shell's completion", description=__doc__)
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=lambda args: _print(args.shell, dict(commands.choices)))


def _print(shell: str, parsers: dict[str, argparse.ArgumentParser]) -> int:
    loads = "autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(_fish(parsers) if shell == "fish" else loads + _bash(parsers), end="")
    return 0


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """The flags that --help shows."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from ((text, action) for text in action.option_strings if text.startswith("--"))


def _bash(parsers: dict[str, argparse.ArgumentParser]) -> str:
    def words(parser: argparse.ArgumentParser) -> str:
        choices = [
            str(word) for action in parser._actions if not action.option_strings for word in action.choices or ()
        ]
        return " ".join([*choices, *(flag for flag, _ in _flags(parser))])

    cases = "\n".join(f'            {name}) words="{words(parser)}" ;;' for name, parser in parsers.items())
    return BASH.format(commands=" ".join(parsers), cases=cases)


def _fish(parsers: dict[str, argparse.ArgumentParser]) -> str:
    lines = ["complete -c octavo -f", f"complete -c octavo -n __fish_use_subcommand -a '{' '.join(parsers)}'"]
    for name, parser in parsers.items():
        seen = f"complete -c octavo -n '__fish_seen_subcommand_from {name}'"
        for flag, action in _flags(parser):
            text = (action.help or "").replace("%%", "%").replace("\\", "").replace("'", "")
            lines.append(f"{seen} -l {flag[2:]} -d '{text}'")
        for action in parser._actions:
            if not action.option_strings and action.choices:
                lines.append(f"{seen} -a '{' '.join(map(str, action.choices))}'")
    return "\n".join(lines) + "\n"
