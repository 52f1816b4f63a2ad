"""The hand-written Python files of the packages, for rules about them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("octavo", "octavo_bench", "router", "gpu_worker")
GENERATED = ("octavo/v1/", "octavo/internal/")


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """Every file: its path from the root, and what it says."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [(path.relative_to(ROOT).as_posix(), path) for path in paths]
    return [(name, ast.parse(path.read_text())) for name, path in names if not name.startswith(GENERATED)]


@cache
def walk(tree: ast.AST) -> list[ast.AST]:
    """All its nodes. Several rules look at each."""
    return list(ast.walk(tree))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported name, dotted in full (`from a import b` is both a and a.b), with its line."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
