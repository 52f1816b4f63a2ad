"""Makes samples of files of WAV, in the process of `octavo.pictures.reader_process` alone."""

import array
import math
import sys

from octavo.pictures.support import RATE
from octavo.pictures.wav_file import FLOAT, PCM, SoundFormat, WavFile

MODES = {(PCM, 16): "F;16S", (FLOAT, 32): "F;32F"}  # Pillow's names of samples
SCALES = {PCM: 1 / 32768, FLOAT: 1.0}


def read_sound(data: memoryview, max_samples: int) -> bytes:
    """The samples, of 16 kHz and one channel, as floats of 32 bits. Raises ValueError with what is wrong with the file.

    Channels are averaged. Another rate becomes 16 kHz by a Lanczos filter, as rows of pictures are resized.
    """
    file = WavFile.read(data)
    form, count = file.form, file.count
    most = max_samples / RATE
    if count > most * form.rate:
        raise ValueError(
            f"lasts {file.seconds:.2f} s, and this model hears {most:g} s at once: send it to "
            "/v1/audio/transcriptions, or part by part, as transcribe of octavo.client does"
        )
    samples = _mono_samples(bytes(file.samples), form, count, min(max_samples, _at_rate(count, form.rate)))
    if not all(map(math.isfinite, samples)):
        raise ValueError("has samples that are no numbers (NaN or infinite): write it again")
    if sys.byteorder == "big":
        samples.byteswap()
    return samples.tobytes()


def _at_rate(count: int, rate: int) -> int:
    return max(1, round(count * RATE / rate))


def _mono_samples(frames: bytes, form: SoundFormat, count: int, wanted: int) -> "array.array[float]":
    from PIL import Image

    mode = MODES[form.kind, form.bits]
    image = Image.frombuffer("F", (form.channels, count), frames, "raw", mode, 0, 1)
    if form.channels > 1:
        image = image.resize((1, count), Image.Resampling.BOX)
    row = Image.frombuffer("F", (count, 1), image.tobytes(), "raw", "F", 0, 1)
    if wanted != count:
        row = row.resize((wanted, 1), Image.Resampling.LANCZOS)
    samples = array.array("f")
    samples.frombytes(row.tobytes())
    return samples if form.kind == FLOAT else array.array("f", [each * SCALES[PCM] for each in samples])
