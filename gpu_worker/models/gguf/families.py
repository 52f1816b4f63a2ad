"""How GGUF files become what a directory of Transformers is: their configurations, and the recipes of their tensors.

Where a file is silent, a setting is what llama.cpp takes it for, or what all published models of that family have.
"""

from collections.abc import Mapping

from gpu_worker.models.gguf.architectures import dense, gemma, gpt, latent, mixtures
from gpu_worker.models.gguf.architectures.gemma3n import read_gemma3n
from gpu_worker.models.gguf.architectures.gemma4 import read_gemma4
from gpu_worker.models.gguf.header import LATENT, GgufHeader
from gpu_worker.models.gguf.recipes import Family, Reader
from gpu_worker.models.gguf.recurrent import RECURRENT


def read_family(header: GgufHeader) -> Family:
    """BadModel if the file has a setting that is not understood, or lacks one."""
    read = FAMILIES[header.arch]
    length = header.integer("attention.key_length", header.head_dim)
    header.refuse_others(header.integer("attention.value_length", length) if header.arch in LATENT else length)
    family = read(header)
    header.refuse_unknown()
    return family


FAMILIES: Mapping[str, Reader] = {
    "gemma3n": read_gemma3n,
    "gemma4": read_gemma4,
    **RECURRENT,
    **dense.READERS,
    **gemma.READERS,
    **gpt.READERS,
    **latent.READERS,
    **mixtures.READERS,
}
