"""Which GGUF files octavo serves, as far as their headers tell, and which of their tokens end an answer.

The command line asks it without loading torch.
"""

from octavo.model_files.gguf import GgufFile, TensorType
from octavo.model_files.gguf_metadata import Metadata

# Architectures whose rotary embedding pairs neighbouring rows of queries and keys, while ours pairs halves: llama.cpp's
# converter interleaves the rows, and ERNIE has them so already. With its rows in our order, ERNIE is a Llama.
INTERLEAVED = ("llama", "mistral3", "smollm3", "ernie4_5")
PAIRED_ADAPTERS = (*INTERLEAVED, "granite")  # whose rows of queries and keys come in pairs in adapters
GPT = ("bloom", "falcon", "gpt2", "mpt")  # which octavo's own decoder of models like GPT runs
# Those that octavo's own decoders run. The tensors of AS_TRANSFORMERS are named as Transformers has them in memory.
AS_TRANSFORMERS = (*GPT, "deepseek2", "exaone4", "gemma", "gemma2", "gemma3", "granite", "minicpm3", "olmo2")
OWN = (
    *(*INTERLEAVED, *AS_TRANSFORMERS, "dots1", "exaone-moe", "glm4moe", "gpt-oss", "minimax-m2", "olmoe", "phi3"),
    *("qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "seed_oss"),
)
# Those that are decoded, and run by the code of Transformers.
THROUGH_TRANSFORMERS = (
    *("afmoe", "apertus", "arcee", "command-r", "cohere2", "ernie4_5-moe", "gemma3n", "gemma4", "glm4"),
    *("gptneox", "granitemoe", "hunyuan-dense", "hunyuan-moe", "jais2", "nemotron", "olmo", "phi2"),
    *("stablelm", "starcoder2"),
    # with recurrent layers
    *("falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "nemotron_h"),
    *("nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"),
)
ARCHITECTURES = (*OWN, *THROUGH_TRANSFORMERS)
WITH_EXPERTS = (
    *("llama", "afmoe", "deepseek2", "dots1", "ernie4_5-moe", "exaone-moe", "gemma4", "glm4moe", "gpt-oss"),
    *("granitemoe", "hunyuan-moe", "minimax-m2", "olmoe", "qwen2moe", "qwen3moe", "qwen3vlmoe"),
    *("granitehybrid", "jamba", "kimi-linear", "lfm2moe", "nemotron_h_moe", "qwen35moe", "qwen3next"),
)

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
DECODED = (
    *FLOATS,
    *(TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1, TensorType.Q8_0),
    *(TensorType.Q2_K, TensorType.Q3_K, TensorType.Q4_K, TensorType.Q5_K, TensorType.Q6_K),
    *(TensorType.IQ1_S, TensorType.IQ1_M, TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ2_S),
    *(TensorType.IQ3_XXS, TensorType.IQ3_S, TensorType.IQ4_NL, TensorType.IQ4_XS),
    *(TensorType.TQ1_0, TensorType.TQ2_0, TensorType.MXFP4),
)
# Types that no kernel multiplies, and those with a kernel whose blocks hold exactly the same numbers.
HELD_AS = {
    TensorType.TQ1_0: TensorType.Q4_0,
    TensorType.TQ2_0: TensorType.Q4_0,
    TensorType.IQ3_S: TensorType.Q6_K,
}
_NAMES = ("eos", "eot", "eom")  # the ends of a sequence, of a turn and of a message
# Many files name the end of a sequence only, and leave it to the program to know the texts of the other ends.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|tool_response>")
NO_VOCABULARY = ("none", "no_vocab")  # of tokenizer.ggml.model, in llama.cpp's words
# Of tokenizer.ggml.token_type. What a user defined is found whole in any text, and not special.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)


def find_obstacle(file: GgufFile) -> str:
    """Why the file cannot be served; empty if nothing in its header is against it. MalformedGguf if it is broken."""
    if (part := file.metadata.integer("split.no", 0)) and file.num_parts > 1:
        return f"this is part {part + 1} of the {file.num_parts} of a model: give the first, whose name has 00001 in it"
    name = file.metadata.string("general.architecture")
    if name not in ARCHITECTURES:
        return f"GGUF files of architecture {name!r} are not read ({', '.join(ARCHITECTURES)} are)"
    if (experts := file.metadata.integer(f"{name}.expert_count", 0)) and name not in WITH_EXPERTS:
        return f"the model has {experts} experts, which are read of {', '.join(WITH_EXPERTS)} alone"
    for tensor in file.tensors.values():
        if tensor.type not in DECODED:
            known = ", ".join(kind.name for kind in DECODED)
            return f"tensor {tensor.name!r} is of type {tensor.type.name}, which is not read ({known} are)"
    return ""


def runs_through_transformers(file: GgufFile) -> bool:
    """Whether a file without an obstacle is run by the code of Transformers, and not by a decoder of octavo's."""
    name = file.metadata.string("general.architecture")
    return name in THROUGH_TRANSFORMERS


def has_tokenizer(metadata: Metadata) -> bool:
    """Whether the file names the kind of its vocabulary; without one it takes token ids alone."""
    return metadata.string("tokenizer.ggml.model", "none") not in NO_VOCABULARY


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """The ids of the tokens that end an answer, each once: those the file names, and those known by their text."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _NAMES]
    ids = [metadata.integer(key) for key in keys if key in metadata]
    if "tokenizer.ggml.tokens" not in metadata:
        return tuple(dict.fromkeys(ids))
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in metadata else []
    # Converters write either type for the end of a turn.
    marked = [i for i, kind in enumerate(types[: len(tokens)]) if kind in (CONTROL, USER_DEFINED)]
    ids += [i for i in marked if tokens[i] in TURN_ENDS]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < len(tokens)))
