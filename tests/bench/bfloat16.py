"""How exact the demo model is in bfloat16: ours and that of transformers, each against float32 on the same weights.

    python tests/bench/bfloat16.py

The weights of the GGUF file are rounded to bfloat16 once and saved as safetensors; every side loads that folder. A row
has the means over all positions of four prompts: the root mean square error of the logits over their deviation, the
Kullback-Leibler divergence from float32, and how often the likeliest token is the same.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
import transformers
from _service import describe_machine
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from gpu_worker.models.checkpoint.demo import demo_file
from gpu_worker.models.checkpoint.gguf_tensors import GgufSource, read_config
from gpu_worker.ops import make_batch, native
from gpu_worker.running.loading import load_runner
from octavo.model_files.gguf import GgufFile
from octavo.text.tokenizer import load_tokenizer

TEXTS = (
    "The capital of France is Paris. It lies on the river Seine, and about two million people live there. The city is "
    "known for its museums, for its food, and for the tower that was built for the world's fair of 1889.",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot, *rest = items\n"
    "    small = [x for x in rest if x < pivot]\n    large = [x for x in rest if x >= pivot]\n"
    "    return quicksort(small) + [pivot] + quicksort(large)\n",
    "Water boils at a lower temperature on a mountain, because the pressure of the air is lower there. At 3000 metres "
    "it boils at about 90 degrees, so potatoes take longer to become soft.",
    "What is the difference between a list and a tuple in Python? A list can be changed after it was made, and a tuple "
    "cannot. Lists are written with square brackets and tuples with round ones.",
)
Logits = Sequence[Tensor]


def save_rounded(directory: Path) -> None:
    """The demo model as a folder of Transformers, its weights in bfloat16."""
    with GgufFile(demo_file()) as file:
        content, source = read_config(file), GgufSource(file)
        tensors = {name: source.get(name).to(torch.bfloat16).contiguous() for name in source.names()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    content |= {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(content))


@torch.inference_mode()
def theirs(directory: Path, prompts: Sequence[list[int]], dtype: torch.dtype) -> Logits:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    return [model(torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in prompts]


@torch.inference_mode()
def ours(directory: Path, prompts: Sequence[list[int]], dtype: str) -> Logits:
    runner = load_runner(str(directory), dtype=dtype, kv_cache_bytes=1 << 27, cache_dir=directory / "cache")
    found = []
    for prompt in prompts:
        length, size = len(prompt), runner.info.block_size
        table, positions = list(range(-(-length // size))), list(range(length))
        batch = make_batch(prompt, positions, positions, [length], [length], [table], torch.device("cpu"))
        hidden = runner._decoder.forward(batch, runner._arena.layers, torch.arange(length))
        found.append(runner._decoder.logits(hidden).float())
    return found


def row(name: str, side: Logits, truth: Logits) -> str:
    pairs = list(zip(side, truth, strict=True))
    error = torch.cat([(x - y).square().mean(-1).sqrt() / y.std(-1) for x, y in pairs]).mean()
    logs = [(x.log_softmax(-1), y.log_softmax(-1)) for x, y in pairs]
    divergence = torch.cat([functional.kl_div(x, y, log_target=True, reduction="none").sum(-1) for x, y in logs])
    same = torch.cat([(x.argmax(-1) == y.argmax(-1)).float() for x, y in pairs]).mean()
    figures = f"{error:.2e} | {divergence.mean():.1e} | {divergence.max():.1e} | {same * 100:.1f} %"
    return f"| {name} | {figures} |"


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    extension = native.load()
    print(f"{describe_machine()}; {extension.isa() if extension else 'no extension'}", file=sys.stderr)
    tokenizer = load_tokenizer(demo_file())
    prompts = [tokenizer.encode(text) for text in TEXTS]
    print("| side | error of logits | mean divergence | largest | same likeliest token |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_rounded(directory)
        truth = theirs(directory, prompts, torch.float32)
        sides: list[tuple[str, Callable[[], Logits]]] = [
            ("transformers, bfloat16", lambda: theirs(directory, prompts, torch.bfloat16)),
            ("octavo, the extension, bfloat16", lambda: ours(directory, prompts, "bfloat16")),
            ("octavo, the extension, float32", lambda: ours(directory, prompts, "float32")),
        ]
        for what, side in sides if extension else sides[:1]:
            print(row(what, side(), truth))
        with mock.patch.object(native, "load", return_value=None):
            for dtype in ("bfloat16", "float32"):
                print(row(f"octavo, reference ops, {dtype}", ours(directory, prompts, dtype), truth))


if __name__ == "__main__":
    main()
