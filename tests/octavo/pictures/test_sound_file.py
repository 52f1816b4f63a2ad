"""Sounds: what WAV means, other rates and channels, and files that are made to break their reader."""

import array
import math
import random
import struct
from contextlib import suppress

import pytest
from spoken_types import said, wav, wav_of

from octavo.pictures.reader import READERS, PictureLimits
from octavo.pictures.support import PictureSupport
from octavo.request.errors import InvalidArgument

SUPPORT = PictureSupport(refusal="", token_id=9, cell=1, num_positions=50)  # a second
HALF_A_MINUTE = PictureSupport(refusal="", token_id=9, cell=1, num_positions=1500)
LIMITS = PictureLimits(num_bytes=12 << 20)
FIELD = "speech.sound"
MONO = struct.pack("<HHIIHH", 1, 1, 16000, 32000, 2, 16)


def read(data, support=SUPPORT, salt=""):
    return READERS.read(data, support, LIMITS, salt, FIELD)


def samples_of(data, support=SUPPORT):
    found = array.array("f")
    found.frombytes(read(data, support).pixels)
    return found.tolist()


@pytest.mark.parametrize("kind", ["int16", "float32"])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_16_khz_are_those_of_the_file(kind, channels):
    """Also behind other parts, in an extended format, and in a file that a program has written into a pipe."""
    samples = said(0.7)
    file = wav(samples, channels=channels, kind=kind)
    assert samples_of(file) == samples
    odd = file[:12] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + file[12:] + b"id3 " + bytes(4)
    assert samples_of(odd) == samples
    form = file[20:36]
    long = struct.pack("<H", 0xFFFE) + form[2:] + struct.pack("<HHIH", 22, 16, 0, form[0]) + bytes(14)
    assert samples_of(wav_of(long, file[44:])) == samples
    for said_size in (0xFFFFFFFF, 0x7FFFF000, 0):
        assert samples_of(wav_of(form, file[44:], said_size)) == samples
    with pytest.raises(InvalidArgument, match="has no samples"):
        read(wav([]) + b"LIST" + struct.pack("<I", 3) + b"abc\0id3 " + bytes(4))
    assert (read(file).rows, read(file).columns) == (1, 50)


def test_channels_are_averaged():
    left, right = said(0.1, 1), said(0.1, 2)
    both = array.array("f", [each for pair in zip(left, right, strict=True) for each in pair]).tobytes()
    found = samples_of(wav_of(struct.pack("<HHIIHH", 3, 2, 16000, 128000, 8, 32), both))
    assert found == pytest.approx([(a + b) / 2 for a, b in zip(left, right, strict=True)], abs=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_other_rates_become_16_khz(rate):
    """A tone is the same tone then, and what lies above half the new rate is left out."""

    def tone(hertz, at, count, shift=0.0):
        return [0.5 * math.sin(2 * math.pi * hertz * (i + shift) / at) for i in range(count)]

    count = rate * 4 // 5
    found = samples_of(wav(tone(400, rate, count), rate, kind="float32"))
    assert len(found) == round(count * 16000 / rate)
    shift = 0.5 - 0.5 * 16000 / rate  # the middle of a sample stays where it is
    expected = tone(400, 16000, len(found), shift)
    assert found[50:-50] == pytest.approx(expected[50:-50], abs=0.01)
    if rate > 40000:
        assert max(map(abs, samples_of(wav(tone(13_000, rate, count), rate, kind="float32"))[50:-50])) < 0.01


def test_a_sound_is_known_by_its_samples_and_its_tenant():
    one, other = said(0.3), said(0.3, 1)
    digests = {read(wav(one)).digest, read(wav(one, channels=2)).digest, read(wav(one, kind="float32")).digest}
    assert len(digests) == 1
    assert len({*digests, read(wav(other)).digest, read(wav(one), salt="x").digest}) == 3


HOSTILE = {
    "nothing": (b"", "no bytes"),
    "a text": (b"hello", "no file of a kind that is known, and WAV is read: make WAV .* ffmpeg"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(40), "ffmpeg"),
    "flac": (b"fLaC" + bytes(40), "is FLAC, and WAV is read: .* ffmpeg"),
    "mp3": (b"ID3\x03" + bytes(40), "is MP3"),
    "mp4": (bytes(4) + b"ftypM4A " + bytes(40), "is MP4"),
    "ogg": (b"OggS" + bytes(40), "is Ogg"),
    "a header alone": (wav([])[:30], "send the whole file"),
    "no samples": (wav([]), "has no samples"),
    "half a sample": (wav_of(MONO, b"a"), "has no samples"),
    "cut": (wav(said(0.5))[:9000], "has 8956 of the 16000 bytes"),
    "a wrong size": (wav_of(MONO, bytes(400), 2_000_000_000), "has 400 of the 2000000000 bytes"),
    "a part without end": (b"RIFF\0\0\0\0WAVEfmt \xff\xff\xff\xff" + bytes(99), "send the whole file"),
    "a short format": (wav_of(MONO[:10], bytes(400)), "its format has 10 bytes"),
    "samples first": (b"RIFF\0\0\0\0WAVEdata\2\0\0\0aafmt ", "before their format"),
    "8 bits": (wav_of(struct.pack("<HHIIHH", 1, 1, 16000, 16000, 1, 8), bytes(400)), "kind 1 with 8 bits"),
    "adpcm": (wav_of(struct.pack("<HHIIHH", 2, 1, 16000, 8000, 2, 4), bytes(400)), "kind 2 with 4 bits"),
    "200 channels": (wav_of(struct.pack("<HHIIHH", 1, 200, 16000, 6400000, 400, 16), bytes(800)), "200 channels"),
    "no channel": (wav_of(struct.pack("<HHIIHH", 1, 0, 16000, 0, 0, 16), bytes(800)), "0 channels"),
    "no rate": (wav_of(struct.pack("<HHIIHH", 1, 1, 0, 0, 2, 16), bytes(800)), "has 0 samples a second"),
    "4 GHz": (wav_of(struct.pack("<HHIIHH", 1, 1, 2**32 - 1, 0, 2, 16), bytes(800)), "4294967295 samples a second"),
    "a wrong align": (wav_of(struct.pack("<HHIIHH", 1, 1, 16000, 32000, 9, 16), bytes(800)), "has 9 bytes for each"),
    "too long": (wav(said(1.1)), r"lasts 1.10 s, and this model hears 1 s at once: send it to /v1/audio/tr"),
    "much silence": (wav_of(struct.pack("<HHIIHH", 1, 1, 8000, 16000, 2, 16), bytes(1 << 20)), "lasts 65.54 s"),
    "too many bytes": (wav_of(MONO, bytes(13 << 20)), "at most 1432576 are what this model hears at once"),
    "nan": (wav([0.0, math.nan, 0.5], kind="float32"), "no numbers"),
    "infinite": (wav([0.0, -math.inf], kind="float32"), "no numbers"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused(name):
    data, what = HOSTILE[name]
    with pytest.raises(InvalidArgument, match=what) as refused:
        read(data)
    assert refused.value.field == FIELD and len(str(refused.value)) < 300


def test_bytes_that_are_changed_are_read_or_refused():
    rng, file = random.Random(3), wav(said(0.02), channels=2)
    for _ in range(300):
        broken = bytearray(file[: rng.choice((len(file), rng.randrange(len(file))))])
        for _ in range(rng.randrange(3)):
            if broken:
                broken[rng.randrange(min(48, len(broken)))] = rng.randrange(256)
        with suppress(InvalidArgument):
            found = samples_of(bytes(broken))
            assert 0 < len(found) <= 16000 and all(map(math.isfinite, found))


def test_the_longest_sound_of_the_highest_rate_is_read_within_its_limits():
    file = wav_of(struct.pack("<HHIIHH", 1, 2, 48000, 192000, 4, 16), bytes(48000 * 30 * 4))
    assert samples_of(file, HALF_A_MINUTE) == [0.0] * 480_000
