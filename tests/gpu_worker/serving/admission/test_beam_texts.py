"""In which searches stop strings are looked for, and with which tokenizer."""

import asyncio
from dataclasses import replace

import pytest

from gpu_worker.serving.admission import beam_texts
from gpu_worker.serving.admission.beam_texts import BeamTexts
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import Mismatch, NotFound, NoTokenizer
from octavo.request.sampling import SamplingParams
from octavo.text.byte_tokenizer import ByteTokenizer

INFO = FakeRunner().info
BEAMS = SamplingParams(beam_width=2, stop=("ab",))


async def test_only_beams_with_stop_strings_have_a_text():
    texts = BeamTexts(INFO)
    assert await texts.new_text(replace(BEAMS, stop=())) is None
    assert await texts.new_text(replace(BEAMS, beam_width=0)) is None
    first, second = await texts.new_text(BEAMS), await texts.new_text(BEAMS)
    assert first.push(b"xab").stopped and not second.push(b"xa").stopped


async def test_the_tokenizer_is_loaded_once_and_only_for_such_a_search(monkeypatch):
    loaded = []

    def load(path):
        loaded.append(path)
        return ByteTokenizer()

    monkeypatch.setattr(beam_texts, "open_tokenizer", load)
    texts = BeamTexts(replace(INFO, tokenizer="/model"))
    await texts.new_text(replace(BEAMS, stop=()))
    assert loaded == []
    await asyncio.gather(*(texts.new_text(BEAMS) for _ in range(4)))
    assert loaded == ["/model"]


async def test_a_tokenizer_that_cannot_be_loaded_is_an_error_of_this_worker(tmp_path):
    with pytest.raises(NotFound, match="tokenizer"):
        await BeamTexts(replace(INFO, tokenizer=str(tmp_path))).new_text(BEAMS)


async def test_a_model_without_a_tokenizer_has_no_stop_strings():
    texts = BeamTexts(replace(INFO, tokenizer=""))
    assert await texts.new_text(replace(BEAMS, stop=())) is None
    with pytest.raises(NoTokenizer, match="send stop_token_ids"):
        await texts.new_text(BEAMS)


async def test_an_error_that_nobody_foresaw_is_told_like_others(monkeypatch):
    monkeypatch.setattr(beam_texts, "open_tokenizer", lambda path: [].pop())
    with pytest.raises(Mismatch, match="/model cannot be loaded here: pop from empty"):
        await BeamTexts(replace(INFO, tokenizer="/model")).new_text(BEAMS)
