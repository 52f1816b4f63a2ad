"""How many cases of each group in tests/csrc/shim CI runs."""

CASES = {
    "decode_mma": 240,
    "decode_simt": 120,
    "prefill_mma": 80,
    "prefill_simt": 60,
    "vllm": 80,
    "merge": 200,
    "write": 300,
    "blocks": 100,
    "layout": 12,  # of nine each
    "convert": 100,
    "rows": 120,
    "sample": 150,
    "sampler": 20,
    "penalize": 60,
    "logprobs": 60,
    "refused": 5,
    "place": 2,
    "plan": 4,
    "swap": 60,
    "swapped": 2,
    "ops": 8,
    "graphs": 3,
    "invariant": 3,
    "compat": 6,
}
