"""What a config.json means where it leaves out what Transformers works out by itself."""

import pytest
import torch
import transformers

from gpu_worker.models.decoders.config import LlamaConfig
from octavo.request.errors import BadModel

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 99,
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("GptOss", {}),
        ("SmolLM3", {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 1, 0]}),
        ("ExaoneMoe", {"sliding_window_pattern": 3}),
        ("Exaone4", {"use_sliding_window": False}),  # a name that its code does not read
    ],
)
def test_windows_are_those_of_transformers(name, more):
    content = getattr(transformers, f"{name}Config")(**SMALL, **more).to_dict()
    kinds = content.pop("layer_types")
    assert len(set(kinds)) == 2
    windows = tuple(8 * (kind == "sliding_attention") for kind in kinds)
    assert LlamaConfig.from_dict({**content, **more}).windows == windows


@pytest.mark.parametrize(("name", "read"), [("Gemma2", True), ("Gemma3Text", False)])
def test_what_the_code_of_a_family_does_not_read_changes_nothing(name, read):
    content = getattr(transformers, f"{name}Config")(**SMALL, attn_logit_softcapping=30.0).to_dict()
    found = LlamaConfig.from_dict({**content, "no_rope_layers": [0] * 5})
    assert found.attention_cap == 30.0 * read and all(found.rotated)


def test_gemma_alone_rounds_the_scale_of_embeddings():
    gemma = LlamaConfig.from_dict(transformers.GemmaConfig(**SMALL).to_dict())
    granite = LlamaConfig.from_dict(transformers.GraniteConfig(**SMALL, embedding_multiplier=12.34).to_dict())
    assert gemma.rounded_to(torch.bfloat16).embedding_scale != gemma.embedding_scale
    assert granite.rounded_to(torch.bfloat16).embedding_scale == 12.34


def test_block_sparse_attention_is_to_some_keys():
    phi = {**SMALL, "model_type": "phi3small", "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    phi |= {"blocksparse_vert_stride": 8, "blocksparse_num_local_blocks": 0}
    with pytest.raises(BadModel, match="block-sparse attention to 0 blocks"):
        LlamaConfig.from_dict(phi)
