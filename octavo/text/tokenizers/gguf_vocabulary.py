"""Reads the tokenizer in the metadata of a GGUF file.

The key tokenizer.ggml.model names its kind: gpt2 is byte-level BPE, llama is sentencepiece's, gemma4 is that of
sentencepiece with merges. For byte-level vocabularies, tokenizer.ggml.pre names how text is split before merging. Both
values are names of llama.cpp and mean here what they mean there.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.model_files import gguf_support
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_metadata import Metadata
from octavo.model_files.gguf_support import end_token_ids
from octavo.request.errors import Mismatch
from octavo.text.tokenizers.parts import TokenizerParts

SPACE = "▁"
MAX_TOKEN = 2048  # characters; finding merges takes the square of a token's length
# Marks that some converters take for words of the user. No text of a client may spell them.
_MARKS = (
    *("<start_of_turn>", "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    *("<tool_response|>", '<|"|>'),
)
# Phi-3 was trained without the white space after an added token, except after these.
_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_WORD_START = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"{_WORD_START}{_UPPER}*{_LOWER}+{_ENDING}|{_WORD_START}{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _GPT4O.replace(_ENDING, "").replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r"]+[\r\n]*|", "]+|")
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral")
# Those that take a word of the vocabulary as one token, whatever the merges say, and begin a text.
_WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS = {  # by the name that tokenizer.ggml.pre has
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "exaone4", "granite-docling"), lambda: _WORDS),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell"),
        lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _WORDS]),
    ),
    # dbrx: Phi-4 and OLMo 2
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "glm4", "chatglm-bpe"), lambda: _split(_LLAMA3)),
    "gpt-4o": lambda: _split(_GPT4O),  # Phi-4-mini
    "tekken": lambda: _split(_TEKKEN),  # Mistral's since Nemo
    "seed-coder": lambda: _split(_SEED),
    "qwen35": lambda: _split(_QWEN35),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), lambda: _split(_QWEN2)),
}


def read_gguf(path: Path) -> TokenizerParts:
    """The parts of the file's tokenizer.

    Raises Mismatch if the kind of vocabulary is not supported, and MalformedGguf if the file is broken.
    """
    with GgufFile(path) as file:
        return _read(file.metadata, path.name)


def _read(metadata: Metadata, name: str) -> TokenizerParts:
    kind = metadata.string("tokenizer.ggml.model")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if (longest := max(map(len, tokens), default=0)) > MAX_TOKEN:
        raise Mismatch(f"{name}: a token of {longest} characters is in the vocabulary; at most {MAX_TOKEN} are read")
    types = metadata.integers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in metadata else []
    if types and len(types) != len(tokens):
        raise Mismatch(f"{name}: tokenizer.ggml.token_type has {len(types)} values for {len(tokens)} tokens")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, name)
        add_bos = _pre(metadata) in _WHOLE_WORDS
    elif kind in ("llama", "gemma4"):
        tokens = _with_spaces(tokens, types)
        prefix = kind == "llama" and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        backend = _sentencepiece(metadata, tokens, types, prefix)
        add_bos = True
    else:
        raise Mismatch(f"{name}: tokenizer {kind!r} is not supported here; use a folder with tokenizer.json")
    marks = [i for i, token in enumerate(tokens) if token in _MARKS]
    named = {*_ids(metadata, "bos", "unknown", "padding"), *end_token_ids(metadata), *marks}
    strips = kind == "llama" and metadata.string("general.architecture", "") == "phi3"
    special = _add_tokens(backend, tokens, types, named, _KEEPS_SPACE if strips else None)
    if "tokenizer.ggml.add_bos_token" in metadata and kind != "gemma4":  # of which early files say otherwise
        add_bos = bool(metadata["tokenizer.ggml.add_bos_token"])
    bos = _ids(metadata, "bos")
    return TokenizerParts(
        backend=backend,
        tokens=tokens,
        special_ids=frozenset(special),
        prefix_ids=bos if add_bos else (),
        eos_token_ids=end_token_ids(metadata),
        template=metadata.string("tokenizer.chat_template", "") or None,
        template_variables=_variables(metadata, tokens),
    )


def _pre(metadata: Metadata) -> str:
    return metadata.string("tokenizer.ggml.pre", "default")


def _byte_level(metadata: Metadata, tokens: Sequence[str], name: str) -> tokenizers.Tokenizer:
    pre = _pre(metadata)
    if pre not in PRE_TOKENIZERS:
        raise Mismatch(f"{name}: tokenizer.ggml.pre {pre!r} is not supported; use a folder with tokenizer.json")
    merges = [_pair(merge) for merge in metadata.strings("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(
    metadata: Metadata, tokens: Sequence[str], types: Sequence[int], prefix: bool
) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        pairs = map(_pair, metadata.strings("tokenizer.ggml.merges"))
        # What a user defined is found before merging, and is in the vocabulary with the spaces of a text.
        merges = [pair for pair in pairs if {*pair, "".join(pair)} <= vocab.keys()]
    else:
        merges = merges_by_score(_mergeable(tokens, types), _scores(metadata, len(tokens)), vocab)
    marked = [i for i, kind in enumerate(types) if kind == gguf_support.UNKNOWN]
    unknown = next((tokens[i] for i in (*marked, *_ids(metadata, "unknown"))), None)
    model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    # A text, and what follows an added token, begins with a space whether it has one or not. There is no pre-tokenizer:
    # tokens may span words.
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _with_spaces(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """The tokens. Tokens that are looked for in the text before it is normalized are written with its spaces."""
    found = {i for i, kind in enumerate(types[: len(tokens)]) if kind == gguf_support.USER_DEFINED}
    return [token.replace(SPACE, " ") if i in found else token for i, token in enumerate(tokens)]


def _mergeable(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """The tokens that merging may make: ordinary ones only, so that no text can spell a control token."""
    ordinary = (gguf_support.NORMAL, gguf_support.UNUSED)
    return {token: i for i, token in enumerate(tokens) if not types or types[i] in ordinary}


def _scores(metadata: Metadata, count: int) -> Sequence[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    numbers = [float(score) for score in scores if isinstance(score, (int, float))] if isinstance(scores, list) else []
    if len(numbers) != count:
        raise Mismatch("the tokenizer has neither merges nor a score for each token")
    return numbers


def merges_by_score(
    mergeable: Mapping[str, int], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Merges that divide text as sentencepiece does: the pair whose union has the highest score goes first."""
    found = []
    for token, index in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                found.append((-scores[index], len(left), len(right), vocab[left], vocab[right], left, right))
    found.sort(key=lambda merge: merge[:5])
    return [merge[5:] for merge in found]


def _add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    named: Collection[int],
    keeps_space: Collection[str] | None,
) -> set[int]:
    """Adds the tokens that are found whole in a text; returns the special ids among them.

    White space after such a token is dropped unless it is one of `keeps_space`; None: all keep it.
    """
    special = {i for i, kind in enumerate(types) if kind == gguf_support.CONTROL} | set(named)
    user_defined = {i for i, kind in enumerate(types) if kind == gguf_support.USER_DEFINED} - special
    found = sorted(special | user_defined)
    strips = {i for i in found if keeps_space is not None and tokens[i] not in keeps_space}
    backend.add_tokens(
        [AddedToken(tokens[i], rstrip=i in strips, normalized=False, special=i in special) for i in found]
    )
    return special


def _ids(metadata: Metadata, *names: str) -> tuple[int, ...]:
    """The ids of named tokens that the file has, each once."""
    count = len(metadata.strings("tokenizer.ggml.tokens"))
    keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
    ids = [metadata.integer(key) for key in keys if key in metadata]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < count))


def _variables(metadata: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return {variable: tokens[ids[0]] for name, variable in names.items() if (ids := _ids(metadata, name))}
