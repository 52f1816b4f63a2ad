"""How many cases of each group in tests/csrc/simt_cases run in `make test-long` and on mutants."""

ATTENTION = {"decode_mma": 240, "decode_simt": 120, "merged": 12, "growing": 9, "vllm": 80, "vllm_sizes": 24}
ATTENTION |= {"longest": 1, "prefill_mma": 400, "prefill_simt": 60, "plan": 4}
BLOCKS = {"write": 300, "blocks": 100, "convert": 100, "swap": 60, "place": 2, "device": 1, "far": 3, "rows": 120}
BLOCKS |= {"linear": 160, "wide_linear": 6, "linear_op": 20, "packed": 120, "ops": 8, "compat": 6, "compat_options": 8}
BLOCKS |= {"fp8": 90, "arguments": 1, "garbage": 200}
SAMPLING = {"sample": 150, "sampler": 20, "penalize": 60, "logprobs": 60, "streams": 60, "errors": 3, "probes": 60}
PROMISES = {"same_bits": 24, "nan": 240, "lost": 24, "graphs": 3, "invariant": 3, "invariant_graphs": 6, "swapped": 2}
BATCHES = {  # each runs in a process of its own, of which `asks_once` is first: nothing was asked before
    "attention and sampling": {"asks_once": 1, **ATTENTION, **SAMPLING},
    "blocks and promises": {**BLOCKS, **PROMISES},
}
CASES = {group: count for batch in BATCHES.values() for group, count in batch.items()}


def usual(count: int) -> int:
    """How many of them `make test` runs."""
    return max(1, count // 90)
