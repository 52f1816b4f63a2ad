"""Low-rank adapters for tests: folders as PEFT writes them, and models of Transformers with one, unmerged."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_lora(
    folder: Path,
    model: nn.Module,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8,
    modules: Sequence[str] = ALL,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    **config: object,
) -> Path:
    """A random adapter for these modules of the model. `config` are further settings."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules and isinstance(module, nn.Linear):
            own = dict(config.get("rank_pattern") or {}).get(name.rpartition(".")[2], rank)
            for side, shape in (("A", (own, module.in_features)), ("B", (module.out_features, own))):
                numbers = torch.randn(shape, generator=generator) * size
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = numbers.to(dtype)
    return write_files(folder, tensors, {"r": rank, "lora_alpha": alpha, "target_modules": list(modules), **config})


def write_files(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.1}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder


def write_gguf_lora(path: Path, folder: Path, arch: str, heads: tuple[int, int]) -> Path:
    """The adapter of a folder as llama.cpp's converter writes it. `heads`: those of queries and of keys."""
    from gguf import GGUFWriter

    config = json.loads((folder / "adapter_config.json").read_text())
    writer = GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    stored = {
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    }
    stored |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        _, _, _, _, layer, block, module, side, _ = name.split(".")
        pairs = arch in ("llama", "granite") and side == "lora_B"
        turned = {"q_proj": heads[0], "k_proj": heads[1]}.get(module) if pairs else None
        if turned is not None:  # rows i and i + half of a head come to stand beside each other
            tensor = tensor.view(turned, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"blk.{layer}.{stored[f'{block}.{module}']}.weight.{side.lower()}", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_small_lora(folder: Path, number: float, size: int = 4) -> Path:
    """An adapter for runners without a model, which look at its digest alone: 8 * `size` bytes."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{name}A.weight": torch.full((1, size), float(number)), f"{name}B.weight": torch.ones(size, 1)}
    return write_files(folder, tensors, {"r": 1, "lora_alpha": 1})


@contextmanager
def adapted(model: nn.Module, folder: Path) -> Iterator[nn.Module]:
    """The model of Transformers with an adapter, computed beside each module's own output."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    hooks = []

    def hook(module: str, a: Tensor, b: Tensor) -> object:
        alpha, rank = config.get("alpha_pattern", {}).get(module, config["lora_alpha"]), len(a)
        scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
        return lambda module, inputs, output: output + (inputs[0] @ a.float().T @ b.float().T) * scale

    for name, module in model.named_modules():
        a = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if a is not None:
            hooks.append(
                module.register_forward_hook(
                    hook(name.rpartition(".")[2], a, tensors[f"base_model.model.{name}.lora_B.weight"])
                )
            )
    try:
        yield model
    finally:
        for each in hooks:
            each.remove()


@torch.inference_mode()
def greedy(model: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens."""
    tokens: list[int] = []
    result = model(torch.tensor([list(prompt)]), use_cache=True)
    while True:
        tokens.append(int(result.logits[0, -1].argmax()))
        if len(tokens) == count:
            return tokens
        result = model(torch.tensor([tokens[-1:]]), past_key_values=result.past_key_values, use_cache=True)


def save_tiny_model(folder: Path) -> nn.Module:
    """A small random Llama without a tokenizer, as Transformers saves it, with tokens that are far from each other."""
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(
        vocab_size=256, num_key_value_heads=2, max_position_embeddings=4096, **sizes, **ends
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return model
