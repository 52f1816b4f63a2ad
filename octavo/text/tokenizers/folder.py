"""Reads the tokenizer of a model's folder: tokenizer.json and the JSON files beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.model_files.json_file import read_json
from octavo.request.errors import Mismatch
from octavo.text.tokenizers.parts import TokenizerParts

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


MAX_GROWTH = 1024  # of a text, by what is done to it before it is divided
MAX_TOKENS = 1 << 22  # more than any vocabulary has; there is a place in memory for every id up to the last


def read_folder(path: Path) -> TokenizerParts:
    """The parts of the folder's tokenizer. Raises Mismatch if a file is broken."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the package raises nothing more specific
        raise Mismatch(f"{path.name}/tokenizer.json cannot be read: {str(error)[:300]}") from error
    _check_growth(backend)
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    variables = {name: text for name in _NAMED if (text := _text(config.get(name)))}
    eos_token_ids = _eos_token_ids(path, backend, variables)
    special = _promote(backend, variables, eos_token_ids)
    frame = _frame_ids(backend)
    return TokenizerParts(
        backend=backend,
        tokens=_tokens(backend),
        special_ids=frozenset(special),
        prefix_ids=frame[0],
        suffix_ids=frame[1],
        eos_token_ids=eos_token_ids,
        template=_template(path, config),
        template_variables=variables,
    )


def _check_growth(backend: tokenizers.Tokenizer) -> None:
    """Refuses steps that together make a text much longer: the package would make it, and end the process."""
    growth = 1.0
    for part in (backend.normalizer, backend.pre_tokenizer):
        for step in _steps(json.loads(part.__getstate__()) if part is not None else None):
            if step.get("type") == "ByteLevel":  # each character becomes one for each of its bytes
                growth *= 2
            elif step.get("type") == "Replace":
                growth *= max(1, len(str(step.get("content", ""))))
    if growth > MAX_GROWTH:
        raise Mismatch(
            f"tokenizer.json: its steps make a text up to {growth:.0f} times as long, {MAX_GROWTH} are enough"
        )


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, in order."""
    if not isinstance(part, dict):
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [step for each in inner for step in _steps(each)] if isinstance(inner, list) else [part]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except ValueError as error:
        raise Mismatch(f"{path.parent.name}/{path.name} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _text(token: object) -> str | None:
    """The text of a token, which is written as that text or as an object with it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _tokens(backend: tokenizers.Tokenizer) -> list[str | None]:
    vocab = backend.get_vocab(with_added_tokens=True)
    if (last := max(vocab.values(), default=-1)) >= MAX_TOKENS:
        raise Mismatch(f"tokenizer.json: a token has the id {last}; ids below {MAX_TOKENS} are read")
    tokens: list[str | None] = [None] * (last + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token
    return tokens


def _eos_token_ids(path: Path, backend: tokenizers.Tokenizer, variables: Mapping[str, str]) -> tuple[int, ...]:
    """The end tokens in generation_config.json, or else in config.json, and the tokenizer's own end token."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        named = _read_json(path / name).get("eos_token_id")
        if named is not None:
            ids += named if isinstance(named, list) else [named]
            if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
                raise Mismatch(f"{path.name}/{name}: eos_token_id has what is no token id")
            break
    own = backend.token_to_id(variables["eos_token"]) if "eos_token" in variables else None
    return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))


def _promote(backend: tokenizers.Tokenizer, variables: Mapping[str, str], eos_token_ids: tuple[int, ...]) -> set[int]:
    """The special ids: those that are marked, and those with a role, which some files forget to mark."""
    added = backend.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    named = (backend.token_to_id(text) for text in variables.values())
    for token_id in {token_id for token_id in named if token_id is not None} | set(eos_token_ids):
        content = backend.id_to_token(token_id)
        if content is None:
            continue
        if token_id not in added:
            backend.add_special_tokens([AddedToken(content, normalized=False, special=True)])
        special.add(token_id)
    return special


def _frame_ids(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that tokenizer.json puts before and after a text. add_bos_token of the configuration does not count."""
    bare = backend.encode("a", add_special_tokens=False).ids
    framed = backend.encode("a", add_special_tokens=True).ids
    for length in range(len(framed) - len(bare) + 1):
        if framed[length : length + len(bare)] == bare:
            return tuple(framed[:length]), tuple(framed[length + len(bare) :])
    return (), ()


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: of its own file, or else of the configuration, which may have several by name."""
    own = path / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
