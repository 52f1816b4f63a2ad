"""The step in one call: what test_architectures.py, which compares it with Transformers, does not show."""

import copy

import pytest
import torch
from differences import difference

from gpu_worker import LLM, SamplingParams
from gpu_worker.models.decoders.decoder import KeptLogits
from gpu_worker.ops import native
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading
from octavo.request.errors import InvalidArgument

pytestmark = pytest.mark.skipif(native.load() is None, reason="the extension was not built")
TOKENS, ENDS = [(7 * i + 3) % 128 for i in range(60)], (1, 17, 24, 25, 26)


@pytest.fixture
def reference(monkeypatch, load):
    """Loads a model on the reference ops."""

    def load_reference(model, **options):
        with monkeypatch.context() as patch:
            patch.setattr(loading, "choose_ops", lambda *_: ReferenceOps())
            return load(model, **options)

    return load_reference


SPARSE = {"blocksparse_block_size": 8, "blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 3}


@pytest.mark.parametrize("more", [{}, {"dense_attention_every_n_layers": 2}, {"blocksparse_homo_head_pattern": True}])
def test_block_sparse_layers(more, tiny, altered, load, reference, all_logits):
    copied = altered("llama", **SPARSE, **more)
    logits = all_logits(load(copied), TOKENS, ENDS)
    assert difference(logits, all_logits(reference(copied), TOKENS, ENDS)) < 1e-5
    assert difference(logits, all_logits(load(tiny("llama").directory), TOKENS, ENDS)) > 1e-3
    if more:
        assert not torch.equal(all_logits(load(altered("llama", **SPARSE)), TOKENS, ENDS), logits)


def test_weights_stored_in_16_bits_stay_so_and_lose_nothing(tiny, load, reference, all_logits, tmp_path):
    copy.deepcopy(tiny("llama").model).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    runner = load(tmp_path / "half")
    assert "bf16" in runner._decoder.name and runner.info.kv_dtype == "float32"
    expected = all_logits(reference(tmp_path / "half"), TOKENS, ENDS)
    assert difference(all_logits(runner, TOKENS, ENDS), expected) < 1e-5


def test_what_cannot_be_quantized_says_so(tiny, load, reference):
    for how, name, scheme, said in (
        (load, "gpt2", "q4", "q4 needs native ops"),
        (reference, "llama", "q8", "q8 needs native ops"),
        (load, "gpt2", "auto-a8", "auto-a8 needs native ops"),
        (load, "llama", "q3", "'q3' is not one of"),
    ):
        with pytest.raises(InvalidArgument, match=f"quantization: .*{said}"):
            how(tiny(name).directory, quantization=scheme)


def test_scores_of_a_prompt_do_not_take_the_place_of_logits_that_are_drawn_from(tiny):
    prompts = [{"prompt_token_ids": [*range(5, length)]} for length in (9, 14, 30)]
    params = {"temperature": 0, "max_tokens": 4, "detokenize": False}
    with LLM(model=str(tiny("llama").directory), kv_cache_bytes=1 << 20) as llm:
        answers = [llm.generate(prompts, SamplingParams(**params, prompt_logprobs=count)) for count in (None, 1)]
    free, scored = ([answer.outputs[0].token_ids for answer in each] for each in answers)
    assert free == scored


def test_kept_logits_lie_in_one_place_up_to_a_size():
    kept = KeptLogits(1 << 20)
    first = kept.rows(3)
    assert kept.rows(2).data_ptr() == first.data_ptr()
    assert kept.rows(40).data_ptr() != kept.rows(16).data_ptr() == kept.rows(1).data_ptr()
