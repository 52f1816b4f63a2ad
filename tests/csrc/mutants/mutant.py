"""A classic bug, and how a copy of the sources gets it."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "csrc"
SIMULATOR = ROOT / "tests" / "csrc" / "simt"


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` becomes `new`; `units` are compiled again, and `by` must fail.

    Files are those of csrc/, or "simt/…", of the simulator.
    """

    file: str
    old: str
    new: str
    units: tuple[str, ...]
    by: str

    def applied(self, text: str) -> str:
        """Raises ValueError where the sources have moved on."""
        if self.old not in text or self.new == self.old:
            raise ValueError(f"{self.file} has no {self.old!r}")
        return text.replace(self.old, self.new)


def read(suite: str) -> dict[str, Mutant]:
    """The mutants of cpu.txt, cuda.txt or pool.txt by their names. A line in brackets says the file, what must fail,
    and the units, where they are not the file itself; below it is `name :: old => new`, where ⏎ ends a line."""
    found = {}
    text = Path(__file__).with_name(f"{suite}.txt").read_text().replace("\n    =>", " =>")
    for line in text.splitlines():
        if place := re.fullmatch(r"\[(.+?)\] ([^:]+)(?:: (.+))?", line):
            file, by, units = place[1], place[2], tuple((place[3] or place[1]).split())
            continue
        name, _, change = line.partition(" :: ")
        old, _, new = f"{change.replace('⏎', chr(10))} ".partition(" => ")
        found[name] = Mutant(file, old, new.removesuffix(" "), units, by)
    return found


def in_folder(file: str, csrc: Path, simulator: Path) -> Path:
    """Where a mutant's file or unit lies."""
    return simulator / file.removeprefix("simt/") if file.startswith("simt/") else csrc / file


@contextmanager
def copy_with(mutant: Mutant, folder: Path) -> Iterator[Path]:
    """`folder` with copies of the sources that have the bug: always the same, so that ccache knows it next time."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCES, folder / "csrc")
    shutil.copytree(SIMULATOR, folder / "simt")
    (folder / "build").mkdir()
    path = in_folder(mutant.file, folder / "csrc", folder / "simt")
    path.write_text(mutant.applied(path.read_text()))
    yield folder


class Sources:
    """The sources, for tests that compile the csrc/ of a folder by themselves."""

    folder = ROOT

    def with_bug(self, mutant: Mutant) -> AbstractContextManager[Path]:
        return copy_with(mutant, ROOT / "build" / "mutant")


class Build:
    """A Ninja build of ours: how each unit was compiled, and how all were linked."""

    def __init__(self, folder: Path, target: str) -> None:
        self.folder = folder
        self.compiled: dict[str, str] = {}
        self.linked = ""
        lines = subprocess.run(
            ["ninja", "-C", folder, "-t", "commands", target], capture_output=True, text=True, check=True
        )
        for line in lines.stdout.splitlines():
            source = re.search(r" -c (\S+)", line)
            if source and (unit := unit_of(Path(source[1]).resolve())):
                self.compiled[unit] = line
            if " -shared " in line:
                self.linked = line.removeprefix(": && ")

    @contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[Path]:
        """A folder with the module as it is with that bug."""
        with copy_with(mutant, self.folder / "mutant") as folder:
            linked, module = self.linked, output_of(self.linked)
            for place, unit in enumerate(mutant.units):
                linked = self.replaced(linked, unit, folder, folder / f"{place}.o")
            self.run(linked.replace(f"-o {module}", f"-o {folder / Path(module).name}"))
            yield folder

    def replaced(self, linked: str, unit: str, folder: Path, new: Path) -> str:
        """Compiles `unit` again and puts it first, because of equal inline functions the linker takes the first.

        A bug may leave something unused, so warnings are no errors.
        """
        command = re.sub(r" -MD -MT \S+ -MF \S+| -Werror", "", self.compiled[unit]).replace(" -O3", " -O1")
        old, module = output_of(command), output_of(linked)
        # The object first: its name may have the sources' folder in it.
        command = command.replace(f" -o {old}", f" -o {new}")
        self.run(command.replace(str(SOURCES), str(folder / "csrc")).replace(str(SIMULATOR), str(folder / "simt")))
        return linked.replace(f" {old}", "").replace(f"-o {module}", f"-o {module} {new}", 1)

    def run(self, command: str) -> None:
        done = subprocess.run(["sh", "-c", command], cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(['sh', '-c', command])}\n{done.stdout}{done.stderr}")


def unit_of(source: Path) -> str | None:
    if source.is_relative_to(SIMULATOR):
        return f"simt/{source.relative_to(SIMULATOR).as_posix()}"
    return source.relative_to(SOURCES).as_posix() if source.is_relative_to(SOURCES) else None


def output_of(command: str) -> str:
    found = re.search(r" -o (\S+)", command)
    if found is None:
        raise ValueError(f"no output in {command}")
    return found[1]


@dataclass(frozen=True)
class Suite:
    """Mutants, what they are made from, and what tests it: says what fails with what is in some folder."""

    mutants: dict[str, Mutant]
    build: Callable[[], Build | Sources]
    first_failure: Callable[[Path, str], str | None]
