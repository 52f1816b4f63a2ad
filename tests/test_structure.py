"""Rules about the code itself that no linter checks; import-linter (pyproject.toml) and ruff check the others."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("octavo", "octavo_bench", "router", "gpu_worker")
GENERATED = ("octavo/v1/", "octavo/internal/")
WIRE_MODULES = {
    "router/streaming": ("inference_service", "request_preparer", "session_opener", "event_encoder"),
    "router/prefixes": ("prefix_keeper",),
    "router/streaming/prompts": ("picture_prompts", "prompt_ends", "prefixed"),
    "router/http/paths": ("adapters", "several_answers", "text_calls"),
    "router/http/prompts": ("output_scores", "prompt_scores"),
    "router/fleet": ("worker_facts", "worker_link", "worker_streams", "progress_calls"),
    "router/pooling": ("vector_messages",),
    "router/admin": ("admin_service", "messages", "cluster_watch"),
    "router/http": (
        "answer_format",
        "answers",
        "bodies/chat_body",
        "bodies/common_fields",
        "bodies/completion_body",
        "bodies/constraint_fields",
        "bodies/reasoning_fields",
        "requests",
        "chats/chat_writer",
        "messages/message_body",
        "messages/message_format",
        "responses/create_endpoint",
        "responses/response_body",
        "responses/stored_endpoint",
    ),
    "gpu_worker/migration": ("transfer_service", "calls/transfer_calls"),
    "gpu_worker/serving/calls": ("worker_service", "step_handler", "messages", "vector_calls"),
}
WIRE_FILES = (
    "octavo/wire/*",
    "octavo/net/server.py",
    "octavo/client/*",
    "octavo/cli/*",
    "octavo/local/*",
    *(f"{folder}/{stem}.py" for folder, stems in WIRE_MODULES.items() for stem in stems),
)
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load"}
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

Violations = Iterator[str]


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """Every hand-written Python file of the packages: its path from the root, and what it says."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [(path.relative_to(ROOT).as_posix(), path) for path in paths]
    return [(name, ast.parse(path.read_text())) for name, path in names if not name.startswith(GENERATED)]


@cache
def walk(tree: ast.AST) -> list[ast.AST]:
    """All its nodes. Several rules look at each."""
    return list(ast.walk(tree))


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; empty for what is no such name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported name, dotted in full (`from a import b` is both a and a.b), with its line."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def wire_types(name: str, tree: ast.AST) -> Violations:
    """Generated types stay at the edge; inside are plain dataclasses."""
    if not any(fnmatch(name, pattern) for pattern in WIRE_FILES):
        found = {line for module, line in imports(tree) if module.startswith(("octavo.v1", "octavo.internal"))}
        yield from (f"line {line}: imports wire types" for line in sorted(found))


def environment(name: str, tree: ast.AST) -> Violations:
    """One file reads the environment, so that --print-config can tell where a value came from."""
    if name == "octavo/settings/loading.py":
        return
    names = {"environ", "environb", "getenv", "getenvb"}
    used = {(node.attr, node.lineno) for node in walk(tree) if isinstance(node, ast.Attribute)}
    imported = {(module.removeprefix("os."), line) for module, line in imports(tree) if module.startswith("os.")}
    yield from (f"line {line}: os.{name}" for name, line in sorted(used | imported) if name in names)


def unsafe_loading(name: str, tree: ast.AST) -> Violations:
    """Nothing that runs what it reads: protobuf, JSON, safetensors and GGUF only."""
    for module, line in imports(tree):
        if module.split(".")[0] in UNSAFE_MODULES:
            yield f"line {line}: imports {module}"
    for node in walk(tree):
        if isinstance(node, ast.Call) and (called := dotted(node.func)) in UNSAFE_CALLS:
            yield f"line {node.lineno}: calls {called}"


def asserts(name: str, tree: ast.AST) -> Violations:
    """`python -O` removes assert and changes __debug__: a check that matters raises."""
    for node in walk(tree):
        if isinstance(node, ast.Assert):
            yield f"line {node.lineno}: assert"
        if isinstance(node, ast.Name) and node.id == "__debug__":
            yield f"line {node.lineno}: __debug__"


def extension(name: str, tree: ast.AST) -> Violations:
    """One file loads the extension and knows what to do without it."""
    if name == "gpu_worker/ops/native.py":
        return
    for module, line in imports(tree):
        if re.search(r"\b_C_(cpu|cuda)\b", module):
            yield f"line {line}: imports the extension"
    for node in walk(tree):
        if isinstance(node, ast.Call) and "import_module" in dotted(node.func) and "_C_c" in ast.unparse(node):
            yield f"line {node.lineno}: imports the extension"


def sources_of_chance(name: str, tree: ast.AST) -> Violations:
    """Clocks and chance are called through their modules (`time.monotonic()`), where the simulation replaces them."""
    if name.startswith(("octavo/cli/", "octavo/local/", "octavo_bench/", "gpu_worker/offline/")):
        return
    called = {id(node.func) for node in walk(tree) if isinstance(node, ast.Call)}
    for module, line in imports(tree):
        if module.split(".")[0] == "uuid" or module.startswith(("time.", "random.", "secrets.", "os.urandom")):
            yield f"line {line}: imports {module}"
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            text = f"{node.value.id}.{node.attr}"
            kept = node.value.id in ("time", "random", "secrets") and id(node) not in called
            if kept or text in ("os.urandom", "random.Random", "random.SystemRandom"):
                yield f"line {node.lineno}: {text}"


RULES: list[Callable[[str, ast.AST], Violations]] = [
    wire_types,
    environment,
    unsafe_loading,
    asserts,
    extension,
    sources_of_chance,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_code_follows(rule: Callable[[str, ast.AST], Violations]) -> None:
    found = [f"{name}: {what}" for name, tree in sources() for what in rule(name, tree)]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (wire_types, "router/placing/dispatcher.py", "from octavo.v1 import inference_pb2"),
        (wire_types, "router/placing/dispatcher.py", "import octavo.v1.inference_pb2 as pb"),
        (wire_types, "gpu_worker/models/server.py", "from octavo.v1.types_pb2 import TokenIds"),
        (environment, "router/placing/dispatcher.py", "import os\nhome = os.environ['HOME']"),
        (environment, "router/placing/dispatcher.py", "from os import getenv"),
        (unsafe_loading, "router/placing/dispatcher.py", "def f():\n    import pickle"),
        (unsafe_loading, "router/placing/dispatcher.py", "torch.load('x')"),
        (unsafe_loading, "router/placing/dispatcher.py", "eval('1')"),
        (asserts, "router/placing/dispatcher.py", "def f(x):\n    assert x"),
        (asserts, "router/placing/dispatcher.py", "if __debug__:\n    f()"),
        (sources_of_chance, "router/placing/dispatcher.py", "from time import monotonic"),
        (sources_of_chance, "router/placing/dispatcher.py", "import time\ndef f(clock=time.monotonic): ..."),
        (sources_of_chance, "router/placing/dispatcher.py", "import random\nrandom.Random()"),
        (extension, "gpu_worker/engine/engine.py", "from gpu_worker import _C_cpu"),
        (extension, "gpu_worker/engine/engine.py", "importlib.import_module('gpu_worker._C_cpu')"),
    ],
)
def test_a_rule_sees_what_breaks_it(rule: Callable[[str, ast.AST], Violations], name: str, text: str) -> None:
    assert list(rule(name, ast.parse(text)))


def requirements(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {re.split(r"[\[<>=! ]", line)[0].lower() for line in listed}


@pytest.mark.parametrize(
    ("package", "extras", "apart"),
    [
        (
            "octavo/",
            (),
            (
                "octavo/text/",
                "octavo/net/",
                "octavo/metrics/",
                "octavo/store/redis",
                "octavo/cli/top/screen.py",
                "octavo/local/development_ca.py",
            ),
        ),  # for the programs, not for clients
        ("octavo/local/development_ca.py", ("certificates",), ()),
        ("octavo/cli/top/screen.py", ("top",), ()),
        ("octavo/text/", ("router",), ()),
        ("octavo/text/", ("worker",), ()),
        ("octavo/net/", ("router",), ()),
        ("octavo/net/", ("worker",), ()),
        ("octavo/store/redis", ("router",), ()),
        ("octavo/store/redis", ("worker",), ()),
        ("octavo/store/redis", ("embedded",), ()),
        ("octavo/metrics/", ("router",), ()),
        ("octavo/metrics/", ("worker",), ()),
        ("octavo_bench/", (), ()),
        ("router/", ("router",), ()),
        ("gpu_worker/", ("worker",), ()),
    ],
)
def test_a_package_imports_only_what_it_declares(package: str, extras: tuple[str, ...], apart: tuple[str, ...]) -> None:
    """What is imported at the top of a module must be installed; what is imported inside a function may be optional."""
    declared = requirements(*extras) | set(PACKAGES) | set(sys.stdlib_module_names)
    for name, tree in sources():
        if name.startswith(package) and not name.startswith(apart):
            for node in tree.body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    for module, line in imports(node):
                        top = module.split(".")[0]
                        assert DISTRIBUTIONS.get(top, top) in declared, f"{name}:{line} imports {top}, not a dependency"


def loaded_by(module: str, forbidden: Iterable[str] = ()) -> set[str]:
    """The modules that a fresh interpreter has after an import, in which the forbidden ones do not exist."""
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(forbidden)!r}:
            raise ImportError(name + " is not declared")
sys.meta_path.insert(0, Absent())
import {module}
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_sdk_loads_no_code_of_a_program() -> None:
    loaded = loaded_by("octavo.client")
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
    loaded_by("octavo_bench", absent - set(PACKAGES))
    loaded = loaded_by("octavo.cli.commands", absent - set(PACKAGES))
    assert {
        f"octavo.cli.{command}"
        for command in ("requests.generate", "requests.chat", "operators.status", "operators.show")
    } <= loaded


def test_a_router_loads_neither_torch_nor_numpy() -> None:
    """import-linter sees our own imports; this sees those of the libraries, too."""
    script = """
import importlib, pkgutil, sys
import router
for module in pkgutil.walk_packages(router.__path__, "router."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted({"torch", "numpy", "transformers"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_worker_loads_torch_for_a_model_alone() -> None:
    """One with a runner that only counts starts in a third of the time, and tests start many."""
    assert not {"torch", "transformers"} & loaded_by("gpu_worker.serving.process.program")


def test_the_floors_are_those_of_the_stubs() -> None:
    """protoc writes into each stub what it needs at least; pyproject.toml promises exactly that."""
    stubs = "\n".join(path.read_text() for path in (ROOT / "octavo" / "v1").glob("*_pb2*.py"))
    grpc = set(re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stubs))
    protobuf = set(re.findall(r"# Protobuf Python Version: ([\d.]+)", stubs))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"grpcio>={version}" for version in grpc} <= set(dependencies)
    assert {f"protobuf>={version},<8" for version in protobuf} <= set(dependencies)
    assert len(grpc) == len(protobuf) == 1


def test_a_folder_has_at_most_twelve_modules() -> None:
    folders = Counter(Path(name).parent for name, _ in sources() if not name.endswith("__.py"))
    assert max(folders.values()) > 6
    assert not {str(folder): count for folder, count in folders.items() if count > 12}


def test_tests_are_not_packages() -> None:
    """tests/router/__init__.py would shadow `router`."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


# ---- documents -----------------------------------------------------------------------------------------------------


def documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [ROOT / line for line in listed.splitlines()] or sorted(ROOT.glob("*.md"))


def anchors(text: str) -> set[str]:
    """The anchors GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
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
        missing_anchor = (
            anchor and target.suffix == ".md" and target.exists() and anchor not in anchors(target.read_text())
        )
        if not target.exists() or missing_anchor:
            broken.append(link)
    return broken


def test_links_resolve() -> None:
    assert len(documents()) > 1
    broken = {str(document.relative_to(ROOT)): broken_links(document) for document in documents()}
    assert not {name: links for name, links in broken.items() if links}


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# Two words\n[a](#two-words) [b](#nowhere) [c](gone.md) [d](a.md#two-words) `[e](f.md)`\n")
    assert broken_links(document) == ["#nowhere", "gone.md"]


@pytest.mark.parametrize("folder", ["protos", *PACKAGES, "csrc", "examples", "k8s", "tests", "tests/bench"])
def test_a_folder_says_what_lives_there(folder: str) -> None:
    assert (ROOT / folder / "README.md").exists()


# ---- protos --------------------------------------------------------------------------------------------------------

DECLARATION = re.compile(r"^\s*(service|rpc|message|enum)\s+(\w+)")


def uncommented(proto: str) -> list[str]:
    """The services, RPCs, messages and enums of a .proto text with no comment right above them."""
    lines = proto.splitlines()
    pairs = zip(["", *lines], lines, strict=False)
    found = ((DECLARATION.match(line), above) for above, line in pairs)
    return [match[2] for match, above in found if match and not above.lstrip().startswith("//")]


def test_every_declaration_of_the_contract_is_explained() -> None:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    assert protos
    assert not {path.name: names for path in protos if (names := uncommented(path.read_text()))}


def test_a_missing_comment_is_seen() -> None:
    assert uncommented("// A.\nmessage A {\n  int32 x = 1;\n  enum E {\n  }\n}\nservice S {}\n") == ["E", "S"]
