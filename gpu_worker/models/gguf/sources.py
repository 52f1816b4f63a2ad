"""How a GGUF file is opened for octavo's own decoder: what config.json of its model says, and its tensors."""

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.checkpoint.weights import BlockSource
from gpu_worker.models.gguf.expert_source import ExpertSource
from gpu_worker.models.gguf.families import read_family
from gpu_worker.models.gguf.header import GgufHeader, architecture
from gpu_worker.models.gguf.llama_like import LlamaLikeSource, read_config
from gpu_worker.models.gguf.recipe_source import RecipeSource, check_tensors, rope_factors
from gpu_worker.models.gguf.recipes import Family
from gpu_worker.models.gguf.tensors import ROPE_FACTORS
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_support import AS_TRANSFORMERS
from octavo.request.errors import BadModel


def source_of(file: GgufFile) -> tuple[Mapping[str, Any], BlockSource]:
    """What config.json of the model in an open file says, and its tensors. BadModel if it is not understood."""
    arch = architecture(file)
    has_experts = file.metadata.integer(f"{arch}.expert_count", 0) > 0
    if not has_experts and arch not in AS_TRANSFORMERS:
        return read_config(file), LlamaLikeSource(file)
    family = read_family(GgufHeader(file, arch))
    config = _config(file, family)
    if has_experts:
        return config, ExpertSource(file, family)
    check_tensors(file, family)
    return config, RecipeSource(file, family)


def _config(file: GgufFile, family: Family) -> dict[str, Any]:
    """What config.json says, with the factors of positions that the file has as a tensor."""
    factors = rope_factors(file, family)
    if factors is None:
        return dict(family.config)
    if "rope_parameters" not in family.config:
        raise BadModel(f"{file.path.name} has {ROPE_FACTORS}, and its model turns no positions")
    return {**family.config, "rope_parameters": _divided(file, family.config["rope_parameters"], factors.tolist())}


def _divided(file: GgufFile, rope: Mapping[str, Any], factors: list[float]) -> Mapping[str, Any]:
    """These positions, of layers that see all keys, with frequencies divided by factors."""
    if (far := rope.get("full_attention")) is not None:
        return {**rope, "full_attention": _divided(file, far, factors)}
    if rope.get("rope_type", "default") != "default":
        arch = architecture(file)
        raise BadModel(f"{file.path.name} scales positions by {ROPE_FACTORS} and by {arch}.rope.scaling")
    return {**rope, "rope_type": "factors", "factors": factors}
