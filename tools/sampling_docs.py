#!/usr/bin/env python
"""Writes the table of docs/sampling.md from octavo/request/sampling.py. With --check it fails where they differ."""

import sys
from pathlib import Path

from octavo.request.sampling import PARAMETERS, Parameter

PAGE = Path(__file__).resolve().parent.parent / "docs/sampling.md"
BEGIN, END = "<!-- parameters: `make generate` writes this table -->\n", "<!-- end of parameters -->"


def allowed(row: Parameter) -> str:
    if row.is_flag:
        return "true or false"
    if row.is_constraint:
        return "[a form](constraints.md)"
    return str(row.allowed or f"at most {row.most}" + (f", {row.entries}" if row.entries else ""))


def left_out(row: Parameter) -> str:
    if row.left_out or row.most is not None:
        return row.left_out or "none"
    return str(row.default).lower() if row.is_flag else f"{row.default:g}"


def kind(row: Parameter) -> str:
    notes = ["by the tokens before"] * row.history + ["not beside beams"] * (not row.beside_beams)
    return ", ".join([row.kind.name.lower(), *notes])


def elsewhere(row: Parameter) -> str:
    other = "" if row.http == row.name else f" `{row.http}`"
    names = [f"HTTP{other}"] * bool(row.http) + [f"LLM `{row.vllm}`"] * bool(row.vllm)
    names += [f"`--{row.name.replace('_', '-')}`"] * (row.flag is not None)
    other = "" if row.transformers == row.name else f" `{row.transformers}`"
    return ", ".join(names + [f"models{other}"] * bool(row.transformers))


def page() -> str:
    """The text of the page with the table as it should be."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    lines = ["| parameter | what it does | allowed | left out | kind | elsewhere | since |", "|" + "---|" * 7]
    for row in PARAMETERS.values():
        cells = (f"`{row.name}`", row.what, allowed(row), left_out(row), kind(row), elsewhere(row), str(row.since))
        lines.append("| " + " | ".join(cells) + " |")
    return head + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("error: docs/sampling.md is not what octavo/request/sampling.py says: run 'make generate'")
