"""docs/ and the READMEs say what the code is: its folders and their imports, its words, in at most a page each."""

import ast
import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from sources import PACKAGES, ROOT, imports, sources, walk

DRAWN = ("octavo", "router", "gpu_worker")
DRAWING = re.compile(r"<!-- folders of (\w+) -->\n```mermaid\n(.*?)```", re.DOTALL)
NODE = re.compile(r'^ *(\w+)\["', re.MULTILINE)
ARROW = re.compile(r"^ *(\w+) --> (\w+)$", re.MULTILINE)


# ---- the drawings of folders ---------------------------------------------------------------------------------------


def drawings():
    """Per package: the folders and modules that docs/how-it-works.md draws, and the arrows between them."""
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    return {name: (set(NODE.findall(drawn)), set(ARROW.findall(drawn))) for name, drawn in DRAWING.findall(text)}


def layers():
    """Per package: the folders and modules that pyproject.toml puts into layers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found: dict[str, set[str]] = {}
    for contract in contracts:
        if contract["type"] == "layers" and contract["containers"][0] in DRAWN:
            names = {name.strip(" ()") for layer in contract["layers"] for name in re.split(r"[|:]", layer)}
            found.setdefault(contract["containers"][0], set()).update(names)
    return found


def arrows(package):
    """Every import between two folders (or modules beside them) of a package, entry points aside."""
    found = {("internal", "v1")} if package == "octavo" else set()  # which are generated
    for file, tree in sources():
        where = file.removesuffix(".py").split("/")
        if where[0] != package or where[1].startswith("__"):
            continue
        for name, _ in imports(tree):
            parts = name.split(".")
            if parts[0] == package and len(parts) > 1 and parts[1] != where[1]:
                found.add((where[1], parts[1]))
    return found


@pytest.mark.parametrize("package", DRAWN)
def test_the_drawing_has_the_folders_of_the_layers(package):
    assert drawings()[package][0] == layers()[package]


@pytest.mark.parametrize("package", DRAWN)
def test_the_drawing_has_the_arrows_of_the_imports(package):
    drawn, real = drawings()[package][1], arrows(package)
    assert real, package
    assert not drawn ^ real, (
        f"{package}: not drawn: {sorted(real - drawn)}; drawn and not there: {sorted(drawn - real)}"
    )


LISTED = re.compile(r"(?<![\w/])(\w+)/(?=[\]`])")


@pytest.mark.parametrize("package", ["octavo", "gpu_worker"])
def test_a_folder_stands_above_those_that_it_imports(package):
    text = (ROOT / package / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    listed = {name: at for at, row in enumerate(rows) for name in LISTED.findall(row)}
    assert set(listed) == drawings()[package][0]
    assert not [arrow for arrow in arrows(package) if listed[arrow[0]] > listed[arrow[1]]]


# ---- READMEs -------------------------------------------------------------------------------------------------------

README_WORDS = 900


def tracked(pattern):
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).exists()] or sorted(ROOT.rglob(pattern))


def test_a_readme_has_at_most_nine_hundred_words():
    readmes = tracked("*README.md")
    assert len(readmes) > 10
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").split()) for path in readmes}
    assert not {name: length for name, length in lengths.items() if length > README_WORDS}


def unnamed_modules(folder):
    """The modules and folders beside a README that it does not name."""
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    text = (folder / "README.md").read_text(encoding="utf-8")
    return sorted(name for name in modules | folders if not re.search(rf"\b{name}\b", text))


def test_a_readme_names_its_modules():
    folders = [path.parent for package in PACKAGES for path in sorted((ROOT / package).rglob("README.md"))]
    assert len(folders) > 10
    unnamed = {folder.relative_to(ROOT).as_posix(): unnamed_modules(folder) for folder in folders}
    assert not {folder: names for folder, names in unnamed.items() if names}


# ---- what is outside the repository --------------------------------------------------------------------------------

OUTSIDE = re.compile(r"\bdesign/\w+\.md|§|\bissue #?\d|\bpoint \d+ of\b", re.IGNORECASE)


def test_nothing_refers_to_what_is_not_here():
    """No file refers to an issue, or to a section of a text that readers do not have."""
    paths = [path for suffix in ("md", "py", "proto", "lua", "toml", "sh") for path in tracked(f"*.{suffix}")]
    found = [path for path in paths if path != Path(__file__) and OUTSIDE.search(path.read_text(encoding="utf-8"))]
    assert len(paths) > 100
    assert not [path.relative_to(ROOT).as_posix() for path in found]


# ---- lines -----------------------------------------------------------------------------------------------------------

SPEC = importlib.util.spec_from_file_location("wrap_prose", ROOT / "tools/wrap_prose.py")
assert SPEC
assert SPEC.loader
wrap_prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wrap_prose)


def test_lines_of_prose_are_short():
    """`make format` wraps the others."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in tracked("*.md")}
    assert len(texts) > 50
    assert not {name: lines for name, text in texts.items() if (lines := wrap_prose.long_lines(text))}


# ---- words -----------------------------------------------------------------------------------------------------------

TERM = re.compile(r"^- \*\*(.+?)\*\*.*?: \S", re.MULTILINE)
VERB = re.compile(r"^\| (?!verb \|)(\w[^|]*) \|", re.MULTILINE)
GLOSSARY_ENTRIES = 90


def test_the_glossary_is_short_and_defines_nothing_twice():
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = TERM.findall(text) + VERB.findall(text)
    assert 50 < len(terms) <= GLOSSARY_ENTRIES
    assert len(set(terms)) == len(terms)


def class_files():
    """The files of every class name."""
    found: dict[str, list[str]] = {}
    for file, tree in sources():
        for node in walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(file)
    return found


def test_no_class_name_is_used_twice():
    found = class_files()
    assert len(found) > 100
    assert not {name: files for name, files in found.items() if len(files) > 1}


def plain_verbs(tree):
    """The lines of functions and methods that are called plain `take` or `check`."""
    functions = (node for node in walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sorted(node.lineno for node in functions if node.name in ("take", "check"))


def test_a_method_names_its_object():
    """`take` and `check` alone say neither what is taken nor what is checked."""
    found = {name: plain_verbs(tree) for name, tree in sources()}
    assert len(found) > 100
    assert not {name: lines for name, lines in found.items() if lines}
