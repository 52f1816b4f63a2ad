"""In which searches stop strings are looked for, and with which tokenizer."""

from dataclasses import replace

import pytest

from gpu_worker.serving.admission import beam_texts
from gpu_worker.serving.admission.beam_texts import BeamTexts
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import Mismatch, NoTokenizer
from octavo.request.sampling import SamplingParams

INFO = FakeRunner().info
BEAMS = SamplingParams(beam_width=2, stop=("ab",))


async def test_only_beams_with_stop_strings_have_a_text():
    texts = BeamTexts(INFO)
    assert await texts.new_text(replace(BEAMS, stop=())) is None
    assert await texts.new_text(replace(BEAMS, beam_width=0)) is None
    first, second = await texts.new_text(BEAMS), await texts.new_text(BEAMS)
    assert first.push(b"xab").stopped and not second.push(b"xa").stopped


async def test_a_model_without_a_tokenizer_has_no_stop_strings():
    texts = BeamTexts(replace(INFO, tokenizer=""))
    assert await texts.new_text(replace(BEAMS, stop=())) is None
    with pytest.raises(NoTokenizer, match="send stop_token_ids"):
        await texts.new_text(BEAMS)


async def test_an_error_that_nobody_foresaw_is_told_like_others(monkeypatch):
    monkeypatch.setattr(beam_texts, "open_tokenizer", lambda path: [].pop())
    with pytest.raises(Mismatch, match="/model cannot be loaded here: pop from empty"):
        await BeamTexts(replace(INFO, tokenizer="/model")).new_text(BEAMS)
