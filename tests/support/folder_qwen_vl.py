"""Tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL of random weights, with a tokenizer of bytes; and pictures for them."""

import base64
import io
import json
from pathlib import Path

import tokenizers
import torch
import transformers
from folder_llama import save_noisy
from PIL import Image

PAD, EOS = 258, 260  # tokens: of a placeholder, and of the end
SPECIAL = ["<|im_start|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|im_end|>"]
# Qwen's own, without what it says of videos and of a default system message.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder_qwen_vl(folder: Path, kind: str = "qwen2_5_vl", **sizes: object) -> Path:
    torch.manual_seed(2)
    text = {
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": EOS,
        **sizes,
    }
    marks = {"image_token_id": PAD, "video_token_id": 263, "vision_start_token_id": 257, "vision_end_token_id": 259}
    config: transformers.PretrainedConfig
    more: dict[str, object] = {}
    if kind.startswith("qwen3_vl"):
        more = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        text |= {"head_dim": 16, "num_hidden_layers": 3}
        vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
        if kind == "qwen3_vl_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
            config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **marks)
        else:
            config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **marks)
    elif kind == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **marks)
    else:
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **marks)
    save_noisy(transformers.AutoModelForImageTextToText.from_config(config), folder)
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(SPECIAL[1:])
    tokenizer.save(str(path))
    told = {"chat_template": TEMPLATE, "eos_token": SPECIAL[-1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", **size_of(kind), **more}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def size_of(kind: str) -> dict[str, int]:
    """Between which numbers of pixels a picture is resized."""
    cell = 32 if kind.startswith("qwen3_vl") else 28
    return {"min_pixels": 4 * cell**2, "max_pixels": 64 * cell**2}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = torch.randint(0, 256, (height // 8 + 1, width // 8 + 1, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy()).resize((width, height), Image.Resampling.BILINEAR)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(data: bytes) -> dict[str, object]:
    """A part of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
