"""What config.json alone rules out, and how that is said."""

import pytest

from gpu_worker.models.decoders.gpt_families import FAMILIES
from gpu_worker.models.model_kind import refuse_unservable
from octavo.model_files import quantization
from octavo.request.errors import BadModel

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def quantized(**how: object) -> dict[str, object]:
    return {"quantization_config": how}


REFUSED = [
    ("bert", "BertModel", {}, "bert is an encoder"),
    ("roberta", "RobertaForCausalLM", {"is_decoder": False}, "is an encoder"),
    ("modernbert", "ModernBertForMaskedLM", {}, "ModernBertForMaskedLM predicts no"),
    ("qwen2", "Qwen2ForSequenceClassification", {}, "Qwen2ForSequenceClassification"),
    ("aria", "XForConditionalGeneration", {"text_config": {"model_type": "aria_text"}}, "use .* alone, .* aria_text$"),
    ("of-nobody", "XForConditionalGeneration", {"vision_config": {}}, "reads pictures of .* no sound beside text$"),
    ("trocr", "X", {"is_encoder_decoder": True}, "trocr is an encoder-decoder, .* kinds bart, .*, whisper$"),
    ("whisper", "WhisperForAudioClassification", {}, "is no encoder-decoder with an output"),
    ("whisper", "WhisperForCausalLM", {"is_encoder_decoder": False}, "this whisper is the decoder of an .* alone"),
    ("of-nobody", "XForConditionalGeneration", {"is_encoder_decoder": True}, "of-nobody is an encoder-decoder"),
    ("t5", "T5EncoderModel", {}, "T5EncoderModel is no encoder-decoder with an output"),
    ("bart", "BartForCausalLM", {"is_encoder_decoder": False}, "this bart is the decoder of an encoder-decoder alone"),
    ("mt5", "MT5ForConditionalGeneration", quantized(quant_method="awq"), "are not read of mt5"),
    ("of-nobody", "XForConditionalGeneration", {}, "XForConditionalGeneration predicts no next token"),
    ("hrm_text", "HrmTextForCausalLM", {}, "its layers run several times for a token"),
    ("any", "AnyForCausalLM", {"layer_types": ["minimax_m3_sparse"]}, "layers of kind minimax_m3_sparse, whose choice"),
    ("deepseek_v32", "XForCausalLM", {"index_topk": 2048}, r"chooses the keys that a query sees \(index_topk 2048\)"),
    ("rwkv", "RwkvForCausalLM", {}, "rwkv keeps a recurrent state"),
    ("any", "AnyForCausalLM", {"layer_types": ["full_attention", "mamba"]}, r"tokens \(layers of kind mamba"),
    ("llama", "LlamaForCausalLM", quantized(quant_method="bitsandbytes"), "weights quantized by 'bitsandbytes'"),
    ("llama", "LlamaForCausalLM", quantized(quant_method="gptq", bits=3), "bits is 3, and 4 and 8 are read"),
    ("qwen3_moe", "XForCausalLM", quantized(quant_method="mxfp4"), "weights quantized by 'mxfp4'"),
    ("llama", "LlamaForCausalLM", {"quantization_config": "fp8"}, "is no object"),
    ("llama", "XForCausalLM", quantized(quant_method="compressed-tensors"), "config_groups does not say"),
    ("bloom", "BloomForCausalLM", quantized(quant_method="fp8"), "are not read of bloom"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "architecture", "more", "reason"), REFUSED)
def test_a_model_of_another_kind_is_refused_by_name(model_type, architecture, more, reason):
    with pytest.raises(BadModel, match=f"^my-model: .*{reason}"):
        refuse_unservable("my-model", {**more, "model_type": model_type, "architectures": [architecture]})


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"quantization_config": None},
        LLAMA | quantized(quant_method="fp8", weight_block_size=[128, 128]),
        {"model_type": "llama"},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "is_decoder": False},
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        {"model_type": "falcon", "architectures": ["RWForCausalLM"]},
        {"model_type": "marian", "architectures": ["MarianMTModel"], "is_encoder_decoder": True},
        {"model_type": "granitemoehybrid", "architectures": ["XForCausalLM"], "layer_types": ["full_attention"]},
    ],
)
def test_what_may_be_a_decoder_passes(config):
    refuse_unservable("my-model", config)


def test_no_weights_are_read_of_a_model_that_is_refused(tmp_path, load):
    """There are none at all: the reason is what config.json says."""
    (tmp_path / "config.json").write_text('{"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}')
    with pytest.raises(BadModel, match="keeps a recurrent state"):
        load(tmp_path)


def test_quantized_files_are_read_of_all_types_but_those_that_neither_octavo_nor_transformers_decodes():
    assert set(quantization.LIKE_GPT) == set(FAMILIES)
    assert not set(quantization.CODED) & set(quantization.WITHOUT_CODES)
