"""Finds the tokenizer of a model's directory, and converts it to tokenizer.json where that is not there yet.

Routers read tokenizer.json alone, by the package `tokenizers`. Transformers knows the other files (sentencepiece's
tokenizer.model, vocab.json with merges.txt, vocab.txt) and how each model uses them, so the worker has it convert them
once, into the directory of caches. What comes out is compared with what went in before it is used.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.request.errors import BadModel, ServingError
from octavo.text.tokenizers.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

# The files that tokenizers are converted from. A model has at least one of them, or its tokenizer is not known here.
LISTS = ("vocab.json", "vocab.txt")
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
VOCABULARIES = (*LISTS, *SENTENCEPIECE)
# What else says how text is divided, or belongs to the tokenizer.
COMPANIONS = (
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "config.json"),
    *("generation_config.json", "chat_template.jinja"),
)
KEPT = ("config.json", "generation_config.json", "chat_template.jinja")  # of these, routers read the original
SAMPLES = ("Hello, world! It's 1234.", "def f(x):\n    return x + 1\n", "Grüße, 你好 🙂")
CACHE_VERSION = 1  # rises when conversion makes other files of the same ones


def find_tokenizer(name: str, directory: Path, cache_dir: Path | None) -> str:
    """The path of the tokenizer that octavo.text.tokenizers reads. Empty if the model has none; the log says why."""
    if (directory / "tokenizer.json").exists():
        return str(directory)
    try:
        return str(_converted(name, directory, cache_dir))
    except (ServingError, OSError, ImportError, ValueError, TypeError, AttributeError) as error:  # broken files
        remedy = "put a tokenizer.json beside the model to serve text; until then it takes token ids only"
        log.warning("model %s has no tokenizer (%s): %s", name, error, remedy)
        return ""


def _converted(name: str, directory: Path, cache_dir: Path | None) -> Path:
    """The folder with the converted tokenizer, which is made if it is not there. BadModel if that cannot be."""
    if not any((directory / file).exists() for file in VOCABULARIES):
        raise BadModel(f"there is none of tokenizer.json, {', '.join(VOCABULARIES)}")
    if cache_dir is None:
        raise BadModel("there is no directory of caches to convert it into")
    target = cache_dir / "tokenizers" / f"{name.replace('/', '--')}-{_key(directory)}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=".part-"))
    try:
        _convert(directory, made)
        os.rename(made, target)
    except OSError:
        if not target.exists():  # or else another worker has just made the same
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    log.info("the tokenizer of model %s is converted into %s", name, target)
    return target


def _key(directory: Path) -> str:
    """Changes with the content of each file that the conversion reads, and with the version of Transformers."""
    from transformers import __version__

    state = hashlib.blake2b(f"{CACHE_VERSION} {__version__}".encode(), digest_size=8)
    for file in (*VOCABULARIES, *COMPANIONS):
        path = directory / file
        content = path.read_bytes() if path.exists() else b""
        state.update(f"{file} {len(content)} ".encode() + content)
    return state.hexdigest()


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer  # seconds of imports that other models do not need

    _sentencepiece(source)  # a file of another kind (tiktoken's) is refused before Transformers guesses what it is
    try:
        original = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False, use_fast=True)
        original.save_pretrained(target)
    except Exception as error:  # of many kinds, and none may keep a worker from serving token ids
        raise BadModel(f"Transformers cannot convert it: {type(error).__name__}: {error}") from error
    if not (target / "tokenizer.json").exists():
        raise BadModel(f"Transformers has no fast form of {type(original).__name__}")
    for file in KEPT:
        if (source / file).exists():
            shutil.copyfile(source / file, target / file)
    _compare(source, original, target)


def _compare(source: Path, original: Any, target: Path) -> None:
    """BadModel unless the converted tokenizer has the tokens of the files, and divides text as they do."""
    vocabulary = original.get_vocab()
    pieces = _sentencepiece(source)
    for token, token_id in (_listed_tokens(source) if pieces is None else _tokens_of(pieces)).items():
        if vocabulary.get(token) != token_id:
            raise BadModel(f"Transformers reads token {token!r} as {vocabulary.get(token)} instead of {token_id}")
    converted = load_tokenizer(target)
    prefix = len(converted.encode(""))
    for text in SAMPLES:
        found, theirs = converted.encode(text)[prefix:], original.encode(text, add_special_tokens=False)
        if found != theirs or (pieces is not None and found != pieces.encode(text)):
            raise BadModel(f"the converted tokenizer divides {text!r} in another way")


def _listed_tokens(source: Path) -> Mapping[str, int]:
    if (source / "vocab.json").exists():
        content = json.loads((source / "vocab.json").read_bytes())
        return {str(token): int(token_id) for token, token_id in content.items()}
    lines = (source / "vocab.txt").read_text(encoding="utf-8").split("\n")
    return {token: index for index, token in enumerate(lines) if token}


def _sentencepiece(source: Path) -> Any:
    """The tokenizer of sentencepiece's own library, if the model has a file of that kind and no other one."""
    files = [path for file in SENTENCEPIECE if (path := source / file).exists()]
    if not files or any((source / file).exists() for file in LISTS):
        return None
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(files[0]))
    except RuntimeError as error:
        raise BadModel(f"{files[0].name} is no file of sentencepiece ({error})") from error


def _tokens_of(pieces: Any) -> Mapping[str, int]:
    return {pieces.id_to_piece(index): index for index in range(pieces.get_piece_size())}
