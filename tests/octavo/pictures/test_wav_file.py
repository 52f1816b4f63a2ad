"""Parts of files of WAV: each moment is in one of them, in files that say what they are."""

import pytest
from spoken_types import said, wav

from octavo.pictures.wav_file import WavFile, largest_file


@pytest.mark.parametrize("kind", ["int16", "float32"])
@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (11025, 2), (16000, 1), (44100, 2)])
def test_parts_are_the_whole(rate, channels, kind):
    data = wav(said(1.3, rate=rate), rate, channels, kind)
    whole = WavFile.read(memoryview(data))
    assert whole.frames == int(100 * whole.seconds) and whole.seconds == pytest.approx(1.3, abs=1e-4)
    parts = [WavFile.read(memoryview(whole.part(first, first + 7))) for first in range(0, 132, 7)]
    assert b"".join(bytes(part.samples) for part in parts) == bytes(whole.samples)
    assert {part.form for part in parts} == {whole.form}
    for first in range(30):  # a part of a second is no longer than a second, wherever it begins
        assert WavFile.read(memoryview(whole.part(first, first + 100))).count == rate
    assert len(whole.part(0, 100)) < largest_file(1)


def test_a_sound_of_no_length_to_speak_of_is_one_part():
    file = WavFile.read(memoryview(wav([0.5])))
    assert file.frames == 1 and file.part(0, 100) == wav([0.5])
