"""The process in which pictures and sounds are decoded, one after another: the script of `octavo.pictures.reader`.

A request is the length of a JSON object, the object, and the bytes of a file. The answer is width and height, and then
the pixels, three bytes each; of a sound it is the samples.
"""

import io
import json
import os
import struct
import sys
from collections.abc import Mapping
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
SIZE = struct.Struct("!II")


def read(request: bytes) -> bytes:
    """Raises ValueError with what is wrong with the file."""
    from octavo.pictures.sound_file import read_sound

    (length,) = struct.unpack_from("!I", request)
    asked, data = json.loads(request[4 : 4 + length]), memoryview(request)[4 + length :]
    return read_sound(data, asked["max_samples"]) if asked["max_samples"] else read_picture(asked, data)


def read_picture(asked: Mapping[str, Any], data: memoryview) -> bytes:
    from PIL import Image, ImageOps, UnidentifiedImageError

    from octavo.pictures.support import PictureSupport, TooOblong

    Image.MAX_IMAGE_PIXELS = asked["max_pixels"]  # what is bigger is refused below, before it is decoded
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > asked["max_pixels"]:
                raise TooManyPixels
            support = PictureSupport(**asked["support"])
            upright = ImageOps.exif_transpose(image)
            plain = upright.convert("RGB")
            high, wide = support.size_of(plain.height, plain.width, asked["max_tokens"])
            pixels = plain.resize((wide, high), Image.Resampling.BICUBIC).tobytes()
    except (TooManyPixels, Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(
            f"has more than {asked['max_pixels']} pixels: reduce it, or ask the operator to raise picture_pixels"
        ) from None
    except UnidentifiedImageError:
        raise ValueError(f"is no picture of a kind that is read ({', '.join(FORMATS)}): convert it") from None
    except (TooOblong, MemoryError):
        raise
    except Exception as error:  # whatever a decoder says of what it finds
        raise ValueError(f"is damaged or incomplete ({str(error)[:100]}): send the whole file") from None
    return SIZE.pack(wide, high) + pixels


class TooManyPixels(Exception):
    """The header says so."""


def main() -> None:
    socket = os.fdopen(0, "rb")
    sys.path[:] = json.loads(socket.readline())

    from octavo.process.helper_loop import prepare, serve

    prepare()
    from PIL import Image

    Image.preinit()  # so that its memory counts to none of the pictures
    serve(socket, read)


if __name__ == "__main__":
    main()
