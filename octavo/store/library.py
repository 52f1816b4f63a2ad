"""The function library: the text that the server runs, joined from lua/ in the order of the file names."""

from functools import cache
from importlib.resources import files

NAME = (
    "octavo1"  # the calling convention; another one gets another name, so that both can be loaded while versions change
)
REVISION = 4  # +1 with every change of the text: a server with a lower one is given ours


def parts() -> dict[str, str]:
    """The files of the library, by name."""
    folder = files("octavo.store") / "lua"
    found = (entry for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return {entry.name: entry.read_text() for entry in sorted(found, key=lambda entry: entry.name)}


def join(texts: dict[str, str]) -> str:
    return "\n".join([f"#!lua name={NAME}", f"local REVISION = {REVISION}", *texts.values()])


@cache
def source() -> str:
    return join(parts())
