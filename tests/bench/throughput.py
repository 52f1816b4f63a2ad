"""tokens/s of the whole service, client to client, beside `transformers` generate with the same weights and dtype.

    python tests/bench/throughput.py [--streams 1 16 48] [--tokens 64] [--rounds 3] [--quantization none|q4|...]

Greedy, 24-token prompts that differ. transformers gets its best case: one static batch, nothing over a network.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from _service import describe_machine, load, service

from gpu_worker.models.checkpoint.demo import demo_file

PROMPT_TOKENS = 24


def prompts(count: int) -> list[list[int]]:
    return [[(7919 * (i + 1) + 104729 * j) % 40000 + 100 for j in range(PROMPT_TOKENS)] for i in range(count)]


class Peer:
    """transformers, loaded from the same file."""

    def __init__(self, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = demo_file()
        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
        )
        self.model.eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")

    def save(self, folder: Path) -> None:
        """As a Transformers folder in float32, which `save_pretrained` refuses to write of a GGUF file."""
        from safetensors.torch import save_file

        tied = ("lm_head.weight",) if self.model.config.tie_word_embeddings else ()
        weights = {name: data.float() for name, data in self.model.state_dict().items() if name not in tied}
        save_file(weights, folder / "model.safetensors")
        config = {**self.model.config.to_dict(), "dtype": "float32"}
        config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config))
        self._tokenizer.save_pretrained(folder)

    def generate_texts(self, texts: list[str], num_tokens: int) -> float:
        encoded = self._tokenizer(texts, padding=True, return_tensors="pt")
        return self._generate(encoded.input_ids, encoded.attention_mask, num_tokens)

    def generate(self, batch: list[list[int]], num_tokens: int) -> float:
        """tokens/s of one static batch."""
        ids = self.torch.tensor(batch)
        return self._generate(ids, self.torch.ones_like(ids), num_tokens)

    def _generate(self, ids: Any, mask: Any, num_tokens: int) -> float:
        began = time.perf_counter()
        with self.torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return len(ids) * num_tokens / (time.perf_counter() - began)


async def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    peer = Peer(args.dtype)
    how = ("--device", "cpu", "--dtype", args.dtype, "--quantization", args.quantization)
    async with service("--model", "smollm2", *how) as running:
        await load(running.client, prompts(2), 4)
        peer.generate(prompts(2), 4)
        for streams in args.streams:
            ours, theirs = [], []
            for _ in range(args.rounds):
                ours.append((await load(running.client, prompts(streams), args.tokens)).tokens_per_s)
                theirs.append(await asyncio.to_thread(peer.generate, prompts(streams), args.tokens))
            us, them = statistics.median(ours), statistics.median(theirs)
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            print(f"{streams:3} streams: octavo {us:7.1f} tokens/s, transformers {them:7.1f}, ratio {ratio:5.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 48])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default="none", help="auto: inputs in 15 bits, which transformers has not")
    asyncio.run(main(parser.parse_args()))
