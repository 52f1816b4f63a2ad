"""Vectors of real (tiny) models: Transformers' hidden states, and the same bits in any batch and in any pieces."""

import pytest
import torch
from pooled import vectors
from sequences import new_sequence
from tiny_llama import CPU, Form, tiny_llama

from gpu_worker.ops import choose_ops, native
from octavo.pooling.params import PoolingParams, PoolKind, logits_of
from octavo.request.sampling import SamplingParams

LAST, MEAN, LOGITS = PoolingParams(), PoolingParams(PoolKind.MEAN), logits_of((5, 17))
TEXT = [(i * 37 + i // 96 * 11) % 96 for i in range(8000)]


@pytest.mark.skipif(native.load() is None, reason="the reference ops are not batch-invariant")
def test_bits_are_those_of_the_prompt_alone() -> None:
    torch.set_num_threads(1)
    form = Form(context=512, block_size=16)
    prompts = [TEXT[i * 61 : i * 61 + 1 + i * 5 % 200] for i in range(0, 63, 2)] + [TEXT[:400]]
    kinds = [(LAST, MEAN, LOGITS)[i % 3] for i in range(32)] + [MEAN]
    asked = list(zip(prompts, kinds, strict=True))

    def run(these: list, others: list = (), **config: object) -> list:
        return vectors(tiny_llama(form, choose_ops(CPU), num_blocks=600).runner, these, others, **config)

    params = SamplingParams(temperature=0, seed=1, max_tokens=60, ignore_eos=True)
    generating = [new_sequence(f"{i:032x}", TEXT[i : i + 70], params) for i in range(8)]
    whole = [run([each], max_batch_tokens=2048)[0] for each in asked]
    assert run(asked, max_batch_tokens=2048) == whole  # all in a batch
    assert run(asked, generating, max_batch_tokens=72, prefix_caching=False) == whole  # beside others, in pieces
    assert run(asked[-1:], max_batch_tokens=7, max_batch_sequences=4) == whole[-1:]
