"""What the packages import is what they declare, and what a program loads at its start."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata

import pytest
from sources import PACKAGES, ROOT, imports, sources

# Which distribution brings a module, where the names differ.
DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_channelz": "grpcio-channelz",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "prometheus_client": "prometheus-client",
}


def requirements(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {re.split(r"[\[<>=! ]", line)[0].lower() for line in listed}


# By beginnings of paths: the extras that bring what these files import, and what has other ones below.
PROGRAMS = ("octavo/text/", "octavo/net/", "octavo/metrics/", "octavo/store/redis")
ASKING = {"octavo/cli/top/screen.py": "top", "octavo/local/development_ca.py": "certificates"}
DECLARED = [("octavo/", (), (*PROGRAMS, *ASKING)), ("octavo_bench/", (), ())]
DECLARED += [(path, (extra,), ()) for path, extra in ASKING.items()]
DECLARED += [(path, (extra,), ()) for path in PROGRAMS for extra in ("router", "worker")]
DECLARED += [("octavo/store/redis", ("embedded",), ()), ("router/", ("router",), ()), ("gpu_worker/", ("worker",), ())]


@pytest.mark.parametrize(("path", "extras", "apart"), DECLARED)
def test_files_import_only_what_they_declare(path: str, extras: tuple[str, ...], apart: tuple[str, ...]) -> None:
    """What is imported at the top of a module must be installed; what is imported inside a function may be optional."""
    declared = requirements(*extras) | set(PACKAGES) | set(sys.stdlib_module_names)
    for name, tree in sources():
        if name.startswith(path) and not name.startswith(apart):
            for node in tree.body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    for module, line in imports(node):
                        top = module.split(".")[0]
                        assert DISTRIBUTIONS.get(top, top) in declared, f"{name}:{line} imports {top}, not a dependency"


def loaded_by(statements: str, forbidden: Iterable[str] = ()) -> set[str]:
    """The modules that a fresh interpreter has after these, in which the forbidden ones do not exist."""
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(forbidden)!r}:
            raise ImportError(name + " is not declared")
sys.meta_path.insert(0, Absent())
{statements}
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_sdk_loads_no_code_of_a_program() -> None:
    loaded = loaded_by("import octavo.client")
    own = {name for name in loaded if name.split(".")[0] in PACKAGES}
    assert len(own) <= 25, sorted(own)
    assert {name.split(".")[1] for name in own - {"octavo"}} == {"client", "request", "wire", "v1"}
    assert "argparse" not in loaded


def test_commands_of_clients_load_without_extras() -> None:
    """`octavo.cli.commands` imports every command, as each call of the command line does."""
    declared, todo = set[str](), list(requirements())
    while todo:
        if (name := todo.pop().lower().replace("_", "-")) not in declared:
            declared.add(name)
            lines = [line for line in metadata.requires(name) or () if "extra ==" not in line]
            todo += [re.split(r"[\[<>=!~; (]", line)[0] for line in lines]
    owners = metadata.packages_distributions().items()
    absent = {name for name, names in owners if declared.isdisjoint(each.lower().replace("_", "-") for each in names)}
    loaded = loaded_by("import octavo_bench, octavo.cli.commands", absent - set(PACKAGES))
    assert {f"octavo.cli.{name}" for name in ("requests.generate", "requests.chat", "operators.show")} <= loaded


def test_programs_load_neither_torch_nor_transformers() -> None:
    """import-linter sees our own imports; this sees those of the libraries, too. A worker loads them for a model alone:
    one with a runner that only counts starts in a third of the time, and tests start many."""
    every = """
import importlib, pkgutil, router
for module in pkgutil.walk_packages(router.__path__, "router."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)"""
    assert not {"torch", "numpy", "transformers"} & loaded_by(every)
    assert not {"torch", "transformers"} & loaded_by("import gpu_worker.serving.process.program")


def test_the_floors_are_those_of_the_stubs() -> None:
    """protoc writes into each stub what it needs at least; pyproject.toml promises exactly that."""
    stubs = "\n".join(path.read_text() for path in (ROOT / "octavo" / "v1").glob("*_pb2*.py"))
    grpc = set(re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stubs))
    protobuf = set(re.findall(r"# Protobuf Python Version: ([\d.]+)", stubs))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"grpcio>={version}" for version in grpc} <= set(dependencies)
    assert {f"protobuf>={version},<8" for version in protobuf} <= set(dependencies)
    assert len(grpc) == len(protobuf) == 1
