"""How much rounding costs: the perplexity of a text by each form of the same weights (K formats: within 0.5 %).

tests/bench/perplexity.py FILE.gguf ... [--schemes none auto q8] [--tokens 8192] [--text FILE ...]

`none` multiplies the numbers of the file with inputs in float32. Without --text it reads the manual of octavo.
"""

import argparse
import math
from pathlib import Path

from _service import describe_machine

from gpu_worker import LLM, SamplingParams

MANUAL = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
PIECE = 1024  # tokens that see each other


def perplexity(llm: LLM, pieces: list[list[int]]) -> float:
    prompts = [{"prompt_token_ids": piece} for piece in pieces]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    scores = [
        scored[token].logprob
        for output in outputs
        for token, scored in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if scored is not None
    ]
    return math.exp(-sum(scores) / len(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--schemes", nargs="+", default=["none", "auto"], help="of --quantization; the first is 100 %%")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--text", nargs="+", type=Path, default=MANUAL)
    arguments = parser.parse_args()
    text = "\n".join(path.read_text() for path in arguments.text)
    print(describe_machine())
    print("\n| file | weights | perplexity | of the first |\n|---|---|---|---|")
    for file in arguments.files:
        first = 0.0
        for scheme in arguments.schemes:
            with LLM(str(file), quantization=scheme) as llm:
                tokens = llm.get_tokenizer().encode(text)[: arguments.tokens]
                pieces = [tokens[start : start + PIECE] for start in range(0, len(tokens), PIECE)]
                found = perplexity(llm, [piece for piece in pieces if len(piece) > 1])
            first = first or found
            print(f"| {file.name} | {scheme} | {found:.4f} | {found / first:.5f} |", flush=True)


if __name__ == "__main__":
    main()
