"""Pictures that are made to break their reader are refused, with the field and what to do, and nobody else notices."""

import io
import itertools
import struct
import zlib

import pytest
from PIL import Image, ImageDraw

from octavo.pictures.reader import READERS, PictureLimits, place_pictures
from octavo.pictures.support import PictureSupport
from octavo.request.errors import InvalidArgument

SUPPORT = PictureSupport(refusal="", token_id=9, cell=28, min_pixels=56 * 56, max_pixels=28 * 28 * 64)
LIMITS = PictureLimits(num_bytes=1 << 20, pixels=1_000_000, tokens=64)
FIELD = "messages[0].content[0]"


def read(data, limits=LIMITS, salt=""):
    return READERS.read(data, SUPPORT, limits, salt, FIELD)


def file_of(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def drawn(width, height):
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse((0, 0, width, height), fill="red", outline="blue")
    return image


def png_chunk(kind, data):
    return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))


def png(width, height, *chunks, depth=8, colour=2):
    """A PNG whose header says this size, whatever it holds."""
    head = png_chunk(b"IHDR", struct.pack("!IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + png_chunk(b"IEND", b"")


ZEROS = zlib.compress(bytes(60 << 20), 9)  # 60 MiB in 60 KiB
PLAIN = file_of(drawn(200, 100))
HOSTILE = {
    "nothing": (b"", "no bytes"),
    "a text": (b"hello", "convert it"),
    "svg with an entity": (b"<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><svg/>", "convert"),
    "a bitmap": (file_of(drawn(64, 64), "BMP"), "convert it"),
    "tiff": (file_of(drawn(64, 64), "TIFF"), "convert it"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) print\n", "convert it"),
    "a header alone": (PLAIN[:33], "whole file|convert it"),
    "half of it": (PLAIN[: len(PLAIN) // 2], "whole file"),
    "half a jpeg": (file_of(drawn(200, 100), "JPEG")[:900], "whole file"),
    "half a webp": (file_of(drawn(200, 100), "WEBP", lossless=True)[:90], "whole file|convert it"),
    "30,000 x 30,000": (png(30_000, 30_000, png_chunk(b"IDAT", ZEROS)), "more than 1000000 pixels"),
    "the largest size": (png(2**31 - 1, 2**31 - 1), "pixels|whole file|convert it"),
    "no size": (png(0, 0), "whole file|convert it|more than"),
    "a bomb of rows": (png(900, 900, png_chunk(b"IDAT", zlib.compress(bytes(9)))), "whole file"),
    "a bomb of text": (png(9, 9, *[png_chunk(b"zTXt", b"a\0\0" + ZEROS)] * 8), "whole file|convert it|cannot be read"),
    "a bomb of colours": (
        png(9, 9, png_chunk(b"iCCP", b"a\0\0" + ZEROS), png_chunk(b"IDAT", b"x")),
        "whole file|cannot",
    ),
    "oblong": (file_of(drawn(3000, 10)), "too oblong"),
    "too many bytes": (b"\x89PNG" + bytes(1 << 20), "at most 1048576"),
    "a large gif": (b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + bytes(64), "pixels|whole file|convert it"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused(name):
    data, what = HOSTILE[name]
    with pytest.raises(InvalidArgument, match=what) as refused:
        read(data)
    assert refused.value.field == FIELD and len(str(refused.value)) < 300
    assert read(PLAIN).rows, "the next one is read"


MODES = ["RGB", "L", "1", "P", "RGBA"]
KINDS = [*itertools.product(["PNG", "WEBP", "GIF"], MODES), *itertools.product(["JPEG"], MODES[:3])]


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_pictures_of_all_kinds_are_read(kind, mode):
    found = read(file_of(drawn(120, 60).convert(mode), kind))
    assert (found.rows, found.columns) == (2, 4)
    assert len(found.pixels) == 56 * 112 * 3


def test_a_picture_becomes_no_more_tokens_than_allowed():
    """The first frame of a film counts."""
    large = read(file_of(drawn(900, 700)), PictureLimits(tokens=12))
    assert 6 < large.rows * large.columns <= 12
    small = read(file_of(drawn(5, 5)))
    assert (small.rows, small.columns) == (2, 2)
    frames = [drawn(60, 60), drawn(60, 60).transpose(Image.Transpose.ROTATE_90)]
    film = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read(film).digest == read(file_of(frames[0], "GIF")).digest


@pytest.mark.parametrize(
    ("limit", "value", "says"), [("SECONDS", 0.001, "more than 0.0 s of a processor"), ("MEMORY", 1 << 20, "1 MiB")]
)
def test_what_takes_too_much_ends_its_process(monkeypatch, limit, value, says):
    monkeypatch.setattr(f"octavo.pictures.reader.{limit}", value)
    monkeypatch.setattr(f"octavo.pictures.reader.{limit}_PER_PIXEL", 0)
    READERS.close()
    with pytest.raises(InvalidArgument, match=f"cannot be read: it .*{says}: reduce it"):
        read(file_of(drawn(900, 900)))
    monkeypatch.undo()
    assert read(PLAIN).rows


def test_a_template_that_hides_a_picture_is_refused():
    picture = read(PLAIN)
    size = picture.rows * picture.columns
    prompt, shown = place_pictures([1, 9, 2], [picture], SUPPORT, "chat.messages")
    assert prompt == [1, *[9] * size, 2] and shown.placed[0].start == 1 and shown.placed[0].end == 1 + size
    for tokens in ([1, 2], [9, 9]):
        with pytest.raises(InvalidArgument, match=r"shows \d of 1 pictures"):
            place_pictures(tokens, [picture], SUPPORT, "chat.messages")
