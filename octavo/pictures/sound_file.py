"""Reads files of WAV, in the process of `octavo.pictures.reader_process` alone."""

import array
import math
import struct
import sys
from dataclasses import dataclass

from octavo.pictures.support import RATE

FORMAT = struct.Struct("<HHIIHH")  # kind, channels, samples a second, bytes a second, bytes of a moment, bits
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MODES = {(PCM, 16): "F;16S", (FLOAT, 32): "F;32F"}  # Pillow's names of samples
SCALES = {PCM: 1 / 32768, FLOAT: 1.0}
LOWEST, HIGHEST = 8000, 48_000  # samples a second
TO_THE_END = 0x7FFFF000  # bytes, or more, or none, as programs say that write into a pipe
REMEDY = "make WAV of it, such as by: ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le speech.wav"
OTHERS = {
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
    b"ID3": "MP3",
    b"\xff\xfb": "MP3",
    b"\xff\xf3": "MP3",
    b"\xff\xf1": "AAC",
    b"\x1aE\xdf\xa3": "WebM",
    b"RF64": "RF64",
    b"RIFX": "RIFX",
    b"FORM": "AIFF",
}


@dataclass(frozen=True, slots=True)
class SoundFormat:
    kind: int
    channels: int
    rate: int
    bits: int


def read_sound(data: memoryview, max_samples: int) -> bytes:
    """The samples, of 16 kHz and one channel, as floats of 32 bits. Raises ValueError with what is wrong with the file.

    Channels are averaged. Another rate becomes 16 kHz by a Lanczos filter, as rows of pictures are resized.
    """
    form, frames = _parts(data)
    size = form.channels * form.bits // 8
    count = len(frames) // size
    if not count:
        raise ValueError("has no samples: send a sound")
    most = max_samples / RATE
    if count > most * form.rate:
        raise ValueError(
            f"lasts {count / form.rate:.2f} s, and this model hears {most:g} s at once: cut it, and send the parts one "
            "by one, what was said before as the prompt of the next"
        )
    samples = _mono_samples(bytes(frames[: count * size]), form, count, min(max_samples, _at_rate(count, form.rate)))
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


def _parts(data: memoryview) -> tuple[SoundFormat, memoryview]:
    """The format of a file, and the bytes of its samples."""
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        raise ValueError(f"is {_name_of(bytes(data[:12]))}, and WAV is read: {REMEDY}")
    form, start = None, 12
    while start + 8 <= len(data):
        name, size = bytes(data[start : start + 4]), int.from_bytes(data[start + 4 : start + 8], "little")
        content = data[start + 8 : start + 8 + size]
        if name == b"data" and not size and not _are_parts(data[start + 8 :]):
            content, size = data[start + 8 :], TO_THE_END
        is_whole = len(content) == size or (name == b"data" and size >= TO_THE_END)
        if name == b"data":
            if form is None:
                raise ValueError(f"has samples before their format: {REMEDY}")
            if not is_whole:
                raise ValueError(f"has {len(content)} of the {size} bytes of its samples: send the whole file")
            return form, content
        if not is_whole:
            break
        if name == b"fmt ":
            form = _format(content)
        start += 8 + size + size % 2
    raise ValueError("is damaged or incomplete (it has no samples): send the whole file")


def _are_parts(data: memoryview) -> bool:
    """Whether these are further parts of a file, and no samples."""
    start = 0
    while start < len(data):
        name, size = bytes(data[start : start + 4]), int.from_bytes(data[start + 4 : start + 8], "little")
        if not (name.isascii() and name.decode("ascii").isprintable()):
            return False
        start += 8 + size
        if start > len(data):
            return False
        start += size % 2
    return True


def _format(content: memoryview) -> SoundFormat:
    if len(content) < FORMAT.size:
        raise ValueError(f"is damaged or incomplete (its format has {len(content)} bytes): send the whole file")
    kind, channels, rate, _, align, bits = FORMAT.unpack_from(content)
    if kind == EXTENSIBLE and len(content) >= 26:
        kind = int.from_bytes(content[24:26], "little")
    if (kind, bits) not in MODES:
        raise ValueError(f"has samples of kind {kind} with {bits} bits; read are PCM of 16 and floats of 32: {REMEDY}")
    if channels not in (1, 2):
        raise ValueError(f"has {channels} channels; read are 1 and 2: {REMEDY}")
    if not LOWEST <= rate <= HIGHEST:
        raise ValueError(f"has {rate} samples a second; read are {LOWEST} to {HIGHEST}: {REMEDY}")
    if align != channels * bits // 8:
        raise ValueError(f"has {align} bytes for each moment, and {channels} samples of {bits} bits: {REMEDY}")
    return SoundFormat(kind, channels, rate, bits)


def _name_of(start: bytes) -> str:
    if start[4:8] == b"ftyp":
        return "MP4"
    return next((name for magic, name in OTHERS.items() if start.startswith(magic)), "no file of a kind that is known")
