"""An adapter in a GGUF file, as llama.cpp's converter writes it, and what is refused of others."""

import numpy as np
import pytest
from gguf import GGUFWriter

from octavo.model_files.lora_config import MAX_RANK
from octavo.model_files.lora_files import read_lora
from octavo.request.errors import BadModel

Q = "blk.0.attn_q.weight.lora_"


def write_gguf(path, *, kind="adapter", adapter="lora", alpha=8.0, more=(), **shapes):
    writer = GGUFWriter(path, "llama")
    writer.add_type(kind)
    writer.add_string("adapter.type", adapter)
    writer.add_float32("adapter.lora.alpha", alpha)
    for key in more:
        writer.add_bool(key, True)
    for name, shape in (shapes or {f"{Q}a": (2, 3), f"{Q}b": (4, 2)}).items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"kind": "model"}, "its general.type is 'model': it is no adapter"),
        ({"adapter": "control_vector"}, "and not lora"),
        ({"more": ["adapter.lora.dora"]}, r"adapter\.lora\.dora is not computed here"),
        ({"alpha": float("nan")}, "is no number"),
        ({"blk.0.attn_norm.weight.lora_a": (2, 3)}, "is not computed here: only lora_a and lora_b of attn_q"),
        ({f"{Q}a": (2, 3), Q.replace("0", "00") + "a": (2, 3)}, "is there twice"),
        ({f"{Q}b": (4, 2)}, "has no tensor lora_a"),
        ({f"{Q}a": (MAX_RANK + 1, 1)}, f"at most {MAX_RANK} is computed"),
        ({f"{Q}a": (2, 3), f"{Q}b": (4, 3)}, "which is not of rank 2"),
        (
            {Q.replace("_q", part) + side: (2, 2) for part in ("_q", "_qkv") for side in "ab"},
            "has qkv_proj and parts of it",
        ),
    ],
)
def test_a_file_that_is_no_adapter_is_refused(tmp_path, said, words):
    assert read_lora(write_gguf(tmp_path / "good.gguf")).rank == 2
    with pytest.raises(BadModel, match=words):
        read_lora(write_gguf(tmp_path / "bad.gguf", **said))
