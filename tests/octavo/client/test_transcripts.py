"""What stands in the way of a sound of several parts, before any of them is asked for."""

import io
import re
import wave

import pytest

from octavo.client import Completion, Event, FinishReason, Model, Speech
from octavo.client.events import Output, Usage
from octavo.client.transcripts import Transcriber
from octavo.pictures.long_speech import SpeechOptions
from octavo.request.errors import InvalidArgument, NoWorkers
from octavo.request.sampling import SamplingParams

FIRST_TIME = 265
HEARS = Model("w", "f", 100, 300, False, True, 1, SamplingParams(), True, 1000, (), FIRST_TIME)


def _sound():
    with wave.open(file := io.BytesIO(), "wb") as written:
        written.setparams((1, 2, 16000, 0, "NONE", ""))
        written.writeframes(bytes(16000))
    return file.getvalue()


GIVEN = Speech(SOUND := _sound())


class HearingClient:
    """What is asked of it, and a language that it names or an error that it raises in its place."""

    def __init__(self, language):
        self.language, self.asked = language, []

    async def models(self):
        return [HEARS]

    async def complete(self, prompt, **options):
        self.asked.append(prompt)
        if isinstance(self.language, Exception):
            raise self.language
        return Completion("r", (Output(0, self.language, (1,), FinishReason.LENGTH),), Usage(1, 1, 0))

    async def generate(self, prompt, **options):
        self.asked.append(prompt)
        yield Event("r", token_ids=(FIRST_TIME, 97, FIRST_TIME + 50), finish_reason=FinishReason.STOP)

    async def detokenize(self, token_ids, **options):
        return "".join(map(chr, token_ids))


async def transcribe(client, speech=GIVEN, **options):
    return await Transcriber(client, speech, None, options, SpeechOptions()).run()


@pytest.mark.parametrize("said", ["<|de|>", InvalidArgument("speech.task", "this model writes English speech")])
async def test_a_language_is_named_unless_the_model_has_one_alone(said):
    client = HearingClient(said)
    found = await transcribe(client)
    assert (found.text, found.language) == ("a", "" if isinstance(said, Exception) else "de")
    assert [(each.task, each.language) for each in client.asked] == [("language", ""), ("", found.language)]


@pytest.mark.parametrize("error", [InvalidArgument("speech.sound", "is no sound"), NoWorkers("none")])
async def test_what_else_is_wrong_with_the_question_is_said(error):
    client = HearingClient(error)
    with pytest.raises(type(error), match=re.escape(error.message)):
        await transcribe(client)
    assert len(client.asked) == 1


@pytest.mark.parametrize(
    ("speech", "options", "what"),
    [
        (Speech(b""), {}, "speech.sound: has no bytes: give those of a whole WAV file"),
        (Speech(None), {}, "speech.sound: has no bytes"),
        (Speech("x"), {}, "speech.sound: .*bytes-like"),
        *((Speech(SOUND), {field: 2}, f"{field}: .*of several parts") for field in ("n", "best_of", "beam_width")),
        (Speech(SOUND), {"request_id": "x" * 114}, "request_id: .*of several parts"),
        (Speech(SOUND), {"stop": "a"}, "stop: does not go with texts whose times are told"),
        (Speech(SOUND), {"allowed_token_ids": [1]}, "allowed_token_ids: does not go"),
        (Speech(SOUND), {"model": "other"}, "model: name one that takes speech; there is w"),
    ],
)
async def test_what_is_wrong_is_said_before_anything_is_asked(speech, options, what):
    client = HearingClient("<|de|>")
    with pytest.raises(InvalidArgument, match=what):
        await transcribe(client, speech, **options)
    assert not client.asked
