"""Tokens/s of streams that ask different adapters, of a server that runs.

    adapters.py URL --adapters 8 [--streams 16] [--shape qwen2.5-0.5b] [--folder DIR] [--llama-cpp]
    adapters.py --write 64 [--gguf] [--shape …] [--folder DIR]

Writes adapters of rank 16 on all seven matrices, with random numbers. They are loaded by vLLM's
`/v1/load_lora_adapter`, which octavo has with `--adapter-folder`; llama.cpp's server has them from its command line
(`--lora-init-without-apply --lora …`), in the order of their numbers. 0 adapters: the model alone.
"""

import argparse
import json
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from _random_adapters import write_adapters
from _random_checkpoint import SHAPES
from _service import post


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
        return str(json.load(answer)["data"][0]["id"])


def tokens_of(url: str, number: int, tokens: int, adapters: int, model: str, *, llama_cpp: bool) -> int:
    text = f"{number}: write a story about a cat who travels far away"
    body: dict[str, Any] = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if adapters and llama_cpp:
        body["lora"] = [{"id": number % adapters, "scale": 1.0}]
    elif adapters:
        body["model"] = f"a{number % adapters}"
    with post(f"{url}/v1/completions", body) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def measured(
    url: str, folders: list[Path], streams: int, requests: int, tokens: int, *, llama_cpp: bool = False
) -> float:
    """Tokens/s. The adapters are in memory before, and each answers once."""
    model = model_of(url)
    if not llama_cpp:
        for folder in folders:
            try:
                post(f"{url}/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)}).close()
            except HTTPError as error:
                if "already" not in (told := error.read().decode(errors="replace")):  # vLLM has it from the last time
                    raise SystemExit(f"{folder.name} was not loaded: {error.code}: {told}") from error
    with ThreadPoolExecutor(streams) as pool:

        def ask(number: int, count: int = tokens) -> int:
            return tokens_of(url, number, count, len(folders), model, llama_cpp=llama_cpp)

        list(pool.map(lambda number: ask(number, 2), range(max(streams, len(folders)))))
        began = time.perf_counter()
        made = sum(pool.map(ask, range(1000, 1000 + requests)))
    return made / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", metavar="URL")
    parser.add_argument("--write", type=int, default=0, metavar="N", help="only write so many")
    parser.add_argument("--gguf", action="store_true", help="as files of llama.cpp")
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=0, help="as many as streams, if not given")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "octavo-bench-models")
    parser.add_argument("--llama-cpp", action="store_true", help="the server is llama.cpp's")
    options = parser.parse_args()
    if options.url is None and not options.write:
        parser.error("give the URL of a server, or --write N")
    if options.write:
        write_adapters(options.shape, options.folder, options.write, gguf=options.gguf)
        return
    for count in options.adapters:
        folders = write_adapters(options.shape, options.folder, count)
        requests = options.requests or options.streams
        rate = measured(options.url, folders, options.streams, requests, options.tokens, llama_cpp=options.llama_cpp)
        print(f"{count} adapters, {options.streams} streams: {rate:.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
