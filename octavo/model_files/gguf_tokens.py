"""The tokens of a GGUF file's vocabulary that end an answer."""

from octavo.model_files.gguf_metadata import Metadata

_NAMES = ("eos", "eot", "eom")  # the ends of a sequence, of a turn and of a message
# Many files name the end of a sequence only, and leave it to the program to know the texts of the other ends.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type; converters write either for the end of a turn


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """The ids of the tokens that end an answer, each once: those the file names, and those known by their text."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _NAMES]
    ids = [metadata.integer(key) for key in keys if key in metadata]
    if "tokenizer.ggml.tokens" not in metadata:
        return tuple(dict.fromkeys(ids))
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in metadata else []
    marked = [i for i, kind in enumerate(types[: len(tokens)]) if kind in (_CONTROL, _USER_DEFINED)]
    ids += [i for i in marked if tokens[i] in TURN_ENDS]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < len(tokens)))
