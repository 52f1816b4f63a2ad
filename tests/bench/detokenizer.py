"""Times detokenizing and stop matching, per token: python tests/bench/detokenizer.py FILE.gguf [--tokens 50000]

Goal: at most 2 microseconds per token for text alone. Streams are pushed token by token, as a lone stream gets them,
and in eights, as steps that were coalesced bring them.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

from octavo.text.detokenizer import Detokenizer
from octavo.text.stop import TextStream
from octavo.text.tokenizer import Tokenizer, load_tokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog; naïve café, 你好世界! 🙂 def f(x):\n    return x ** 2  # 3.14\n" * 50
)
STOPS = {"no stop strings": (), "one": ("</answer>",), "sixteen": tuple(f"\n{word}:" for word in "abcdefghijklmnop")}


def per_token(action: Callable[[], object], num_tokens: int) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / num_tokens * 1e6


def feed(push: Callable[[Sequence[int]], object], ids: Sequence[int], size: int) -> None:
    for start in range(0, len(ids), size):
        push(ids[start : start + size])


def measure(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    def detokenizer() -> Detokenizer:
        return tokenizer.detokenizer()

    for size in (1, 8):
        micros = per_token(lambda size=size: feed(detokenizer().push, ids, size), len(ids))  # type: ignore[misc]
        print(f"detokenizer, {size} at a time:                {micros:6.2f}")
        for name, stops in STOPS.items():
            micros = per_token(
                lambda size=size, stops=stops: feed(TextStream(detokenizer(), stops=stops).push, ids, size),  # type: ignore[misc]
                len(ids),
            )
            print(f"text stream, {size} at a time, {name + ':':17} {micros:6.2f}")
    print(f"resumed from the journal, one stop string:  {resume(tokenizer, ids):6.2f}")


def resume(tokenizer: Tokenizer, ids: Sequence[int]) -> float:
    return per_token(lambda: TextStream(tokenizer.detokenizer(), stops=STOPS["one"]).resume(ids, 100), len(ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a GGUF file or a folder with tokenizer.json")
    parser.add_argument("--tokens", type=int, default=50_000)
    options = parser.parse_args()
    start = time.perf_counter()
    tokenizer = load_tokenizer(options.tokenizer)
    print(f"loaded in {time.perf_counter() - start:.2f} s; load average {os.getloadavg()[0]:.2f}")
    ids = tokenizer.encode(TEXT)
    ids = (ids * (options.tokens // len(ids) + 1))[: options.tokens]
    start = time.perf_counter()
    tokenizer.encode(TEXT * 10)
    print(f"encoding: {(time.perf_counter() - start) / (len(TEXT) * 10) * 1e6:.3f} microseconds per character")
    print("microseconds per token, median of 5")
    measure(tokenizer, ids)


if __name__ == "__main__":
    main()
