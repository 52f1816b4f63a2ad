"""Wraps long prose in Markdown files: `python tools/wrap_prose.py [FILE...]`, all tracked files without an argument.

A paragraph or list item with a line of more than 140 characters is wrapped at 120. Only line breaks change: code,
tables, headings and comments stay, and no span of code is divided. `long_lines` is what tests/test_docs.py asks.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LIMIT, WIDTH = 140, 120
BULLET = re.compile(r"\s*([-*+]|\d+[.)])\s+")
ALONE = re.compile(r"\s*([|#>]|\[[^\]]+\]: |[-=*_]{3,}$|</?\w)")  # tables, headings, quotes, links, rules, HTML
BLOCK = re.compile(r"\s*(`{3,}|<!--)")
WORD = re.compile(r"(?:(`+).+?\1(?!`)|\S)+")
Paragraph = list[str]


def parts(text: str) -> Iterator[tuple[bool, Paragraph]]:
    """The lines of a text in groups, and whether a group is prose: a paragraph or a list item."""
    prose: Paragraph = []
    end, listed = "", False
    for line in text.split("\n"):
        block = BLOCK.match(line)
        bullet = BULLET.match(line)
        indented = not prose and not listed and line.startswith("    ")
        if end or block or indented or not line.strip() or ALONE.match(line):
            if prose:
                yield True, prose
            prose = []
            yield False, [line]
            if end:
                end = "" if end in line else end
            elif block:
                end = "-->" if block[1] == "<!--" else block[1]
                end = "" if end == "-->" and end in line else end
            continue
        if bullet and prose:
            yield True, prose
            prose = []
        listed = bool(bullet) or (listed and (bool(prose) or line.startswith(" ")))
        prose = [*prose, line]
    if prose:
        yield True, prose


def wrapped(lines: Paragraph) -> Paragraph:
    """The paragraph in lines of at most WIDTH characters, as far as its words allow."""
    bullet = BULLET.match(lines[0])
    first = bullet[0] if bullet else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    rest = lines[1][: len(lines[1]) - len(lines[1].lstrip())] if len(lines) > 1 else " " * len(first)
    found, line = [], first
    for match in WORD.finditer(" ".join([lines[0][len(first) :], *lines[1:]])):
        word = match[0]
        fits = len(line) + len(word) < WIDTH or line in (first, rest)
        if fits or BULLET.match(f"{word} ") or ALONE.match(word):
            line += word if line in (first, rest) else f" {word}"
        else:
            found.append(line)
            line = rest + word
    return [*found, line]


def long_lines(text: str) -> list[str]:
    """The lines of prose that are too long."""
    return [line for prose, lines in parts(text) if prose for line in lines if len(line) > LIMIT]


def wrap(text: str) -> str:
    """The text with its long paragraphs wrapped."""
    kept = (wrapped(lines) if prose and max(map(len, lines)) > LIMIT else lines for prose, lines in parts(text))
    return "\n".join(line for lines in kept for line in lines)


def main(names: list[str]) -> None:
    if not names:
        names = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True).stdout.split()
    for path in map(Path, names):
        text = path.read_text(encoding="utf-8")
        if (new := wrap(text)) != text:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
