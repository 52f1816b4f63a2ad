"""Groups without a service: LLM and AsyncLLM take vLLM's names of ranks and stages."""

from pathlib import Path
from typing import Any

import pytest

from gpu_worker import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from octavo.request.errors import InvalidArgument

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
SIZES: dict[str, Any] = {"threads": 1, "kv_cache_bytes": "4MiB", "swap_bytes": 0}
PROMPT = "A tale of ranks"


def said(llm: LLM) -> list[int]:
    (answer,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    return answer.outputs[0].token_ids


@pytest.mark.usefixtures("forked_ranks")
async def test_llm_runs_in_stages(folder: Path) -> None:
    with LLM(str(folder), **SIZES) as alone:
        expected = said(alone)
    with LLM(str(folder), pipeline_parallel_size=2, **SIZES) as llm:
        assert said(llm) == expected
    llm = AsyncLLM(str(folder), pipeline_parallel_size=3, **SIZES)
    try:
        async for answer in llm.generate(PROMPT, PARAMS, request_id="one"):
            assert answer.outputs[0].token_ids == expected
    finally:
        llm.shutdown()


def test_more_stages_than_layers_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"^pipeline_parallel: this model has 3 layers: give no more stages"):
        LLM(str(folder), pipeline_parallel_size=4, **SIZES)
