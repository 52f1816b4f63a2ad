"""A step in one call computes what the decoder in torch does, and rounding costs what it may."""

import copy

import numpy as np
import pytest
import torch
from differences import difference
from effort import diagonal
from instruction_sets import ISAS
from transformers_types import MIXTURES

from gpu_worker import LLM, SamplingParams
from gpu_worker.ops import make_batch, native
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading
from octavo.request.errors import InvalidArgument

pytestmark = pytest.mark.skipif(native.load() is None, reason="the extension was not built")
KINDS = ["llama", "llama-biases", "mistral", "qwen2", "qwen3", "smollm3", "llama-dynamic", *MIXTURES]


@pytest.fixture
def reference(monkeypatch, load):
    """Loads a model on the reference ops."""

    def load_reference(model, **options):
        with monkeypatch.context() as patch:
            patch.setattr(loading, "choose_ops", lambda *_: ReferenceOps())
            return load(model, **options)

    return load_reference


def run(runner, lengths: list[tuple[int, int]], seed: int = 0) -> torch.Tensor:
    """Logits of all tokens of some sequences: a prompt in one step, then `more` tokens of each in another."""
    rng = np.random.default_rng(seed)
    size, blocks = runner.info.block_size, iter(rng.permutation(runner.info.num_blocks).tolist())
    tables = [[next(blocks) for _ in range(-(-(a + b) // size))] for a, b in lengths]
    parts = []
    for first in (True, False):
        spans = [(0, a) if first else (a, a + b) for a, b in lengths]
        places = [(i, p) for i, (start, end) in enumerate(spans) for p in range(start, end)]
        batch = make_batch(
            rng.integers(0, runner.info.vocab_size, len(places)).tolist(),
            [p for _, p in places],
            [tables[i][p // size] * size + p % size for i, p in places],
            [end - start for start, end in spans],
            [end for _, end in spans],
            tables,
            torch.device("cpu"),
        )
        rows = torch.arange(len(places)).flip(0)
        with torch.inference_mode():
            parts.append(runner._decoder.logits(runner._decoder.forward(batch, runner._arena.layers, rows)).clone())
    return torch.cat(parts)


LENGTHS = [(1, 1), (23, 1), (8, 9), (40, 0), (16, 1)]


@pytest.mark.parametrize(("kind", "isa"), diagonal(KINDS, ISAS), indirect=["isa"])
def test_it_is_the_decoder_in_torch(kind, isa, tiny, load, reference):
    expected, logits = run(reference(tiny(kind).directory), LENGTHS), run(load(tiny(kind).directory), LENGTHS)
    assert difference(logits, expected) < 1e-5


SPARSE = {"blocksparse_block_size": 8, "blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 3}


@pytest.mark.parametrize("more", [{}, {"dense_attention_every_n_layers": 2}, {"blocksparse_homo_head_pattern": True}])
def test_block_sparse_layers(more, tiny, altered, load, reference):
    copied = altered("llama", **SPARSE, **more)
    expected, logits = run(reference(copied), LENGTHS), run(load(copied), LENGTHS)
    assert difference(logits, expected) < 1e-5
    dense = run(load(tiny("llama").directory), LENGTHS)
    assert difference(logits, dense) > 1e-3
    if more:
        assert not torch.equal(run(load(altered("llama", **SPARSE)), LENGTHS), logits)


def test_weights_stored_in_16_bits_stay_so_and_lose_nothing(tiny, load, reference, tmp_path):
    copy.deepcopy(tiny("llama").model).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    tiny("llama").model.float()
    runner = load(tmp_path / "half")
    assert "bf16" in runner._decoder.name and runner.info.kv_dtype == "float32"
    expected = run(reference(tmp_path / "half"), LENGTHS)
    assert difference(run(runner, LENGTHS), expected) < 1e-5


def test_what_cannot_be_quantized_says_so(tiny, load, reference):
    with pytest.raises(InvalidArgument, match="quantization: q4 needs native ops"):
        load(tiny("gpt2").directory, quantization="q4")
    with pytest.raises(InvalidArgument, match="quantization: q8 needs native ops"):
        reference(tiny("llama").directory, quantization="q8")
    with pytest.raises(InvalidArgument, match="quantization: auto-a8 needs native ops"):
        load(tiny("gpt2").directory, quantization="auto-a8")
    with pytest.raises(InvalidArgument, match="'q3' is not one of"):
        load(tiny("llama").directory, quantization="q3")


def test_scores_of_a_prompt_do_not_take_the_place_of_logits_that_are_drawn_from(tiny):
    prompts = [{"prompt_token_ids": [*range(5, length)]} for length in (9, 14, 30)]
    params = {"temperature": 0, "max_tokens": 4, "detokenize": False}
    with LLM(model=str(tiny("llama").directory), kv_cache_bytes=1 << 20) as llm:
        answers = [llm.generate(prompts, SamplingParams(**params, prompt_logprobs=count)) for count in (None, 1)]
    free, scored = ([answer.outputs[0].token_ids for answer in each] for each in answers)
    assert free == scored
