"""How many cases of each group in tests/csrc/simt_cases run in `make test-long` and on mutants."""

BATCHES = {  # each runs in a process of its own
    "attention": {
        "decode_mma": 240,
        "decode_simt": 120,
        "merged": 12,
        "growing": 9,
        "vllm": 80,
        "vllm_sizes": 24,
        "longest": 1,
        "prefill_mma": 400,
        "prefill_simt": 60,
        "plan": 4,
    },
    "blocks": {
        "write": 300,
        "blocks": 100,
        "convert": 100,
        "swap": 60,
        "place": 2,
        "device": 1,
        "far": 3,
        "rows": 120,
        "linear": 160,
        "wide_linear": 6,
        "linear_op": 20,
        "packed": 120,
        "ops": 8,
        "compat": 6,
        "compat_options": 8,
        "arguments": 1,
        "garbage": 200,
    },
    "sampling": {
        "sample": 150,
        "sampler": 20,
        "penalize": 60,
        "logprobs": 60,
        "streams": 60,
        "errors": 3,
        "probes": 60,
    },
    "promises": {
        "same_bits": 24,
        "nan": 240,
        "lost": 24,
        "graphs": 3,
        "invariant": 3,
        "invariant_graphs": 6,
        "swapped": 2,
    },
    "launches": {"asks_once": 1},  # first in its process: nothing was asked before
}
CASES = {group: count for batch in BATCHES.values() for group, count in batch.items()}


def usual(count: int) -> int:
    """How many of them `make test` runs."""
    return max(1, count // 20)
