"""What config.json alone rules out, and how that is said."""

import json
import time

import pytest

from gpu_worker.models.model_kind import refuse_unservable
from octavo.request.errors import BadModel

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "bert is an encoder"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "bert is an encoder"),
        ({"model_type": "roberta", "architectures": ["RobertaForCausalLM"], "is_decoder": False}, "is an encoder"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, "ModernBertForMaskedLM predicts no"),
        ({"model_type": "llama", "architectures": ["LlamaModel"]}, "LlamaModel predicts no next token"),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]},
            "Qwen2ForSequenceClassification",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder"),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, "BartForConditionalGeneration"),
        (
            {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512},
            r"multi-head latent attention \(MLA, kv_lora_rank 512\)",
        ),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba keeps a recurrent state"),
        ({"model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"]}, "recurrent state"),
        (
            {"model_type": "any", "architectures": ["AnyForCausalLM"], "layer_types": ["full_attention", "mamba"]},
            r"recurrent state between tokens \(layers of kind mamba\)",
        ),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "weights quantized by 'gptq'"),
        (LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        (
            {
                "model_type": "gpt_oss",
                "architectures": ["GptOssForCausalLM"],
                "quantization_config": {"quant_method": "mxfp4"},
            },
            r"'mxfp4' .* write them in bfloat16 first",
        ),
        (LLAMA | {"quantization_config": "fp8"}, "is no object"),
        (
            LLAMA | {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "'pack-quantized' is not read",
        ),
        (
            {
                "model_type": "opt",
                "architectures": ["OPTForCausalLM"],
                "quantization_config": {"quant_method": "fp8"},
            },
            "opt is none",
        ),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(config, reason):
    with pytest.raises(BadModel, match=f"^my-model: .*{reason}"):
        refuse_unservable("my-model", config)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"model_type": "llama"},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "is_decoder": False},
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        {"model_type": "falcon", "architectures": ["RWForCausalLM"]},
        {"model_type": "granitemoehybrid", "architectures": ["XForCausalLM"], "layer_types": ["full_attention"]},
        LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        LLAMA | {"quantization_config": None},
    ],
)
def test_what_may_be_a_decoder_passes(config):
    refuse_unservable("my-model", config)


def test_no_weights_are_read_of_a_model_that_is_refused(tmp_path, load):
    """The directory has none at all: the reason is what config.json says, and it comes at once."""
    config = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    started = time.monotonic()
    with pytest.raises(BadModel, match="multi-head latent attention"):
        load(tmp_path)
    assert time.monotonic() - started < 1
