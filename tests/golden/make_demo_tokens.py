"""Writes demo_tokens.json: what Transformers generates greedily with the demo model, loaded by its own GGUF reader.

    python tests/golden/make_demo_tokens.py

Takes about a minute and needs the package `accelerate`, which nothing else here does. Run it when the demo model
changes, never because a test failed. Prompts are such that no choice is close (smallest_gap).
"""

import json
from pathlib import Path

import torch
import transformers

from gpu_worker.models.checkpoint.locate import demo_file

PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWrite a haiku about paper.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at",
]
NUM_TOKENS = 64


def main() -> None:
    torch.set_num_threads(1)
    file = demo_file()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            result = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=None,  # the end token is a token like others: goes on behind it
                output_logits=True,
                return_dict_in_generate=True,
            )
        output = result.sequences[0, len(ids) :].tolist()
        top = [logits[0].topk(2).values for logits in result.logits]
        gap = min(float(pair[0] - pair[1]) for pair in top)
        last = result.logits[-1][0]
        cases.append(
            {
                "prompt": prompt,
                "prompt_ids": ids,
                "token_ids": output,
                "smallest_gap": round(gap, 4),  # between the two highest logits: how firm the choice is
                "last_logits": {str(i): round(float(last[i]), 3) for i in last.topk(5).indices.tolist()},
            }
        )
        print(repr(tokenizer.decode(cases[-1]["token_ids"])), cases[-1]["smallest_gap"])
    content = {"model": file.name, "transformers": transformers.__version__, "cases": cases}
    Path(__file__).with_name("demo_tokens.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
