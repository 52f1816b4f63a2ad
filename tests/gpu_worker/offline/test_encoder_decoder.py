"""LLM of a model with an encoder gives the tokens of Transformers' generate, and refuses by name what it has not."""

from collections.abc import Iterator

import pytest
from encoded_types import TinyEncoded

from gpu_worker.offline.llm import LLM
from gpu_worker.offline.params import OfflineParams
from octavo.request.errors import InvalidArgument, Unimplemented

GREEDY = OfflineParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT, END = "the house is wonderful", 258


@pytest.fixture(scope="module", params=["bart", "t5-gated"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyEncoded:
    return TinyEncoded(request.param, tmp_path_factory.mktemp("encoded"))


@pytest.fixture(scope="module")
def llm(tiny: TinyEncoded) -> Iterator[LLM]:
    with LLM(str(tiny.directory), block_size=16, kv_cache_bytes=4 << 20, max_batch_tokens=32) as made:
        yield made


def test_texts_and_ids_get_the_tokens_of_transformers(llm: LLM, tiny: TinyEncoded) -> None:
    """A text ends with the token that its tokenizer puts after it, and the caller is shown what it has asked."""
    ids = [*range(30, 90)]
    text, tokens, again = llm.generate([TEXT, {"prompt_token_ids": ids}, {"prompt_token_ids": ids}], GREEDY)
    assert text.prompt_token_ids == [*map(ord, TEXT), END] and tokens.prompt_token_ids == ids
    assert text.outputs[0].token_ids == tiny.generate(text.prompt_token_ids, 12)
    assert tokens.outputs[0].token_ids == again.outputs[0].token_ids == tiny.generate(ids, 12)
    [cached] = llm.generate([{"prompt_token_ids": ids}], GREEDY)
    assert cached.outputs[0].token_ids == tokens.outputs[0].token_ids and cached.num_cached_tokens == 48


def test_what_is_not_there_is_refused_by_name(llm: LLM) -> None:
    most = llm.engine.workload.info.encoder.max_encoded
    for params, prompt, what in (
        (OfflineParams(prompt_logprobs=1), TEXT, "sampling_params.prompt_logprobs: this model encodes its prompt"),
        (OfflineParams(truncate_prompt_tokens=3), TEXT, "truncate_prompt_tokens"),
        (GREEDY, {"prompt_token_ids": [5] * (most + 1)}, f"encoder reads at most {most}"),
    ):
        with pytest.raises(InvalidArgument, match=what):
            llm.generate([prompt], params)
    with pytest.raises(InvalidArgument, match="no chat template"):
        llm.chat([{"role": "user", "content": TEXT}], GREEDY)
    with pytest.raises(Unimplemented, match="hidden states cannot be read"):
        llm.embed([TEXT])
    [longest] = llm.generate([{"prompt_token_ids": [5] * most}], OfflineParams(max_tokens=5000, ignore_eos=True))
    assert len(longest.outputs[0].token_ids) >= 1
