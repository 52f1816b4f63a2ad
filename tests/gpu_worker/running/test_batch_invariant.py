"""`--batch-invariant`: a sequence gets the same tokens and log probabilities, to the bit, in any batch."""

import pytest
import torch
from scheduler_parts import SchedulerParts
from tiny_llama import CPU, PROMPTS, Form, request, tiny_llama

from gpu_worker.ops import choose_ops, native
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running.loading import _expect_invariant
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from octavo.request.errors import InvalidArgument

torch.set_num_threads(1)


def scores(sequences, **config):
    """Tokens and log probabilities of each, as bits, through the scheduler."""
    tiny = tiny_llama(Form(vocab=128, hidden=48), choose_ops(CPU), num_blocks=120)
    _expect_invariant(choose_ops(CPU), tiny.decoder, tiny.arena)
    parts, found = SchedulerParts(SchedulerConfig(**{"max_batch_sequences": 16, **config}), tiny.runner.info), {}
    for item in parts.run_all(tiny.runner, *sequences):
        found.setdefault(item.seq_id, []).extend((s.token_id, s.logprob, s.top) for s in item.scores)
    return found


@pytest.mark.skipif(native.load() is None, reason="the reference ops round by the batch's shape")
def test_through_the_engine_on_a_cpu():
    sequences = [request(i, prompt, logprobs=3, temperature=1.0) for i, prompt in enumerate(PROMPTS)]
    alone = {}
    for i, prompt in enumerate(PROMPTS):
        alone |= scores([request(i, prompt, logprobs=3, temperature=1.0)], max_batch_tokens=64)
    assert scores(sequences, max_batch_tokens=512) == alone
    sequences = [request(i, prompt, logprobs=3, temperature=1.0) for i, prompt in enumerate(PROMPTS)]
    assert scores(sequences, max_batch_tokens=17) == alone, "prompts in pieces"
    assert all(len(each) == 24 for each in alone.values())


def test_what_cannot_keep_it_is_refused():
    tiny = tiny_llama(Form(), ReferenceOps())
    with pytest.raises(InvalidArgument, match=r"decoder llama on reference ops, with a cache of float32"):
        _expect_invariant(ReferenceOps(), tiny.decoder, tiny.arena)
