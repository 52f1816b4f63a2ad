"""Links of documents lead somewhere, folders have a README, and each declaration of the contract is explained."""

import re
import subprocess
from functools import cache
from pathlib import Path

from sources import PACKAGES, ROOT


def documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [ROOT / line for line in listed.splitlines()] or sorted(ROOT.glob("*.md"))


@cache
def anchors(document: Path) -> set[str]:
    """The anchors GitHub gives to the headings of a document."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?) *$", prose, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    """The links of a document that lead nowhere inside the repository. Links to elsewhere are not followed."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", document.read_text(), flags=re.M | re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_links_resolve(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# Two words\n[a](#two-words) [b](#nowhere) [c](gone.md) [d](a.md#two-words) `[e](f.md)`\n")
    assert broken_links(document) == ["#nowhere", "gone.md"]
    assert len(documents()) > 1
    broken = {str(document.relative_to(ROOT)): broken_links(document) for document in documents()}
    assert not {name: links for name, links in broken.items() if links}


def test_folders_say_what_lives_there() -> None:
    folders = ["protos", *PACKAGES, "csrc", "examples", "k8s", "tests", "tests/bench"]
    assert not [folder for folder in folders if not (ROOT / folder / "README.md").exists()]


DECLARATION = re.compile(r"^\s*(service|rpc|message|enum)\s+(\w+)")


def uncommented(proto: str) -> list[str]:
    """The services, RPCs, messages and enums of a .proto text with no comment right above them."""
    lines = proto.splitlines()
    pairs = zip(["", *lines], lines, strict=False)
    found = ((DECLARATION.match(line), above) for above, line in pairs)
    return [match[2] for match, above in found if match and not above.lstrip().startswith("//")]


def test_every_declaration_of_the_contract_is_explained() -> None:
    assert uncommented("// A.\nmessage A {\n  int32 x = 1;\n  enum E {\n  }\n}\nservice S {}\n") == ["E", "S"]
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    assert protos
    assert not {path.name: names for path in protos if (names := uncommented(path.read_text()))}
