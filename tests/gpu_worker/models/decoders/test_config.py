"""What a config.json means where it leaves out what Transformers works out by itself."""

import pytest
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
    ],
)
def test_windows_are_those_of_transformers(name, more):
    content = getattr(transformers, f"{name}Config")(**SMALL, **more).to_dict()
    kinds = content.pop("layer_types")
    assert len(set(kinds)) == 2
    windows = tuple(8 * (kind == "sliding_attention") for kind in kinds)
    assert LlamaConfig.from_dict({**content, **more}).windows == windows


def test_block_sparse_attention_is_to_some_keys():
    phi = {**SMALL, "model_type": "phi3small", "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    phi |= {"blocksparse_vert_stride": 8, "blocksparse_num_local_blocks": 0}
    with pytest.raises(BadModel, match="block-sparse attention to 0 blocks"):
        LlamaConfig.from_dict(phi)
