"""Rules about the code itself that no linter checks; import-linter (pyproject.toml) and ruff check the others."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch

import pytest
from sources import ROOT, imports, sources, walk

WIRE_MODULES = {
    "router/streaming": ("inference_service", "request_preparer", "session_opener", "event_encoder"),
    "router/prefixes": ("prefix_keeper",),
    "router/streaming/prompts": ("asked_prompt", "picture_prompts", "prompt_ends", "prefixed"),
    "router/http/paths": (
        *("adapters", "several_answers", "text_calls"),
        *("transcriptions", "long_transcriptions", "transcript_formats"),
    ),
    "router/http/prompts": ("output_scores", "prompt_scores"),
    "router/fleet": ("worker_facts", "worker_link", "worker_streams", "progress_calls"),
    "router/pooling": ("vector_messages",),
    "router/admin": ("admin_service", "messages", "cluster_watch"),
    "router/http": (
        *("answer_format", "answers", "requests", "chats/chat_writer"),
        *("bodies/chat_body", "bodies/common_fields", "bodies/completion_body", "bodies/constraint_fields"),
        *("bodies/reasoning_fields", "bodies/transcription_body", "messages/message_body", "messages/message_format"),
        *("responses/create_endpoint", "responses/response_body", "responses/stored_endpoint"),
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
Violations = Iterator[str]


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; empty for what is no such name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


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


# By rule: what breaks it.
RULES: dict[Callable[[str, ast.AST], Violations], tuple[str, ...]] = {
    wire_types: (
        "from octavo.v1 import inference_pb2",
        "import octavo.v1.inference_pb2 as pb",
        "from octavo.v1.types_pb2 import TokenIds",
    ),
    environment: ("import os\nhome = os.environ['HOME']", "from os import getenv"),
    unsafe_loading: ("def f():\n    import pickle", "torch.load('x')", "eval('1')"),
    asserts: ("def f(x):\n    assert x", "if __debug__:\n    f()"),
    extension: ("from gpu_worker import _C_cpu", "importlib.import_module('gpu_worker._C_cpu')"),
    sources_of_chance: (
        "from time import monotonic",
        "import time\ndef f(clock=time.monotonic): ...",
        "import random\nrandom.Random()",
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_code_follows(rule: Callable[[str, ast.AST], Violations]) -> None:
    for text in RULES[rule]:
        assert list(rule("router/placing/dispatcher.py", ast.parse(text))), f"{text} is not seen"
    found = [f"{name}: {what}" for name, tree in sources() for what in rule(name, tree)]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


def test_a_folder_has_at_most_twelve_modules() -> None:
    folders = Counter(name.rpartition("/")[0] for name, _ in sources() if not name.endswith("__.py"))
    assert max(folders.values()) > 6
    assert not {folder: count for folder, count in folders.items() if count > 12}


def test_tests_are_not_packages() -> None:
    """tests/router/__init__.py would shadow `router`."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
