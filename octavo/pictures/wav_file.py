"""What a WAV file says of itself, and files of its parts: nothing is made of samples here."""

import struct
from dataclasses import dataclass

FORMAT = struct.Struct("<HHIIHH")  # kind, channels, samples a second, bytes a second, bytes of a moment, bits
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
KINDS = ((PCM, 16), (FLOAT, 32))
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
MOST_CHANNELS, MOST_BESIDE = 2, 1 << 20
MOST_PARTS = 1000  # of a file, before its samples or after them
FRAMES_A_SECOND = 100  # in which models count


@dataclass(frozen=True, slots=True)
class SoundFormat:
    kind: int
    channels: int
    rate: int
    bits: int

    @property
    def size(self) -> int:
        """The bytes of a moment."""
        return self.channels * self.bits // 8


@dataclass(frozen=True, slots=True)
class WavFile:
    """A file that is whole, as far as its head says."""

    form: SoundFormat
    samples: memoryview

    @classmethod
    def read(cls, data: memoryview) -> "WavFile":
        """Raises ValueError with what is wrong with the file."""
        form, samples = _parts(data)
        count = len(samples) // form.size
        if not count:
            raise ValueError("has no samples: send a sound")
        return cls(form, samples[: count * form.size])

    @property
    def count(self) -> int:
        """How many moments it has."""
        return len(self.samples) // self.form.size

    @property
    def seconds(self) -> float:
        return self.count / self.form.rate

    @property
    def frames(self) -> int:
        """Its whole hundredths of a second, and one at least."""
        return max(1, self.count * FRAMES_A_SECOND // self.form.rate)

    def part(self, first: int, end: int) -> bytes:
        """A file of the hundredths of a second from one on to another."""
        form = self.form
        begin, stop = (form.size * (frame * form.rate // FRAMES_A_SECOND) for frame in (first, end))
        samples = self.samples[begin:stop]
        said = FORMAT.pack(form.kind, form.channels, form.rate, form.rate * form.size, form.size, form.bits)
        head = b"WAVEfmt " + struct.pack("<I", len(said)) + said + b"data" + struct.pack("<I", len(samples))
        return b"".join((b"RIFF", struct.pack("<I", len(head) + len(samples)), head, samples))


def largest_file(seconds: float) -> int:
    """The bytes of a file of so many seconds at most, whatever is said beside them."""
    return int(seconds * HIGHEST) * MOST_CHANNELS * 4 + MOST_BESIDE


def _parts(data: memoryview) -> tuple[SoundFormat, memoryview]:
    """The format of a file, and the bytes of its samples."""
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        raise ValueError(f"is {_name_of(bytes(data[:12]))}, and WAV is read: {REMEDY}")
    form, start = None, 12
    for _ in range(MOST_PARTS):
        if start + 8 > len(data):
            break
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
    for _ in range(MOST_PARTS):
        if start >= len(data):
            return True
        name, size = bytes(data[start : start + 4]), int.from_bytes(data[start + 4 : start + 8], "little")
        if not (name.isascii() and name.decode("ascii").isprintable()):
            return False
        start += 8 + size
        if start > len(data):
            return False
        start += size % 2
    return False


def _format(content: memoryview) -> SoundFormat:
    if len(content) < FORMAT.size:
        raise ValueError(f"is damaged or incomplete (its format has {len(content)} bytes): send the whole file")
    kind, channels, rate, _, align, bits = FORMAT.unpack_from(content)
    if kind == EXTENSIBLE and len(content) >= 26:
        kind = int.from_bytes(content[24:26], "little")
    if (kind, bits) not in KINDS:
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
