"""The rules of times, beside those of Transformers' own processor of logits."""

import random

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from gpu_worker.models.through_transformers.time_rules import TimeRules

END, NO_TIMES, SIZE = 20, 24, 60
FIRST = NO_TIMES + 1


def test_what_may_come_is_what_transformers_lets_come():
    """After each token of outputs that keep the rules, whatever the logits are."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    num_closed = 0
    for case in range(60):
        most = rng.choice([0, 3, 50])
        told = GenerationConfig(eos_token_id=END, no_timestamps_token_id=NO_TIMES, max_initial_timestamp_index=most)
        theirs, ours = WhisperTimeStampLogitsProcessor(told, begin_index=2), TimeRules(FIRST, END, most)
        output: list[int] = []
        while len(output) < 12:
            logits = torch.randn(SIZE, generator=generator) * 3
            logits[FIRST:] -= rng.choice([0.0, 2.0, 4.0])  # so that now the times together win, and now a text
            expected = theirs(torch.tensor([[1, 2, *output]]), logits[None])[0]
            ours.confine(logits, output)
            assert torch.equal(logits, expected), (case, output)
            num_closed += bool(logits[:FIRST].isinf().all())
            output.append(int(logits.softmax(0).multinomial(1, generator=generator)))
            if output[-1] == END:
                break
    assert num_closed > 100
