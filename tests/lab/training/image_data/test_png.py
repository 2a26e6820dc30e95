"""PNG images: what is read, and what is refused."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tieline.lab.training.data_files import DataError
from tieline.lab.training.image_data import read_png

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def written(pixels, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def chunk(kind, contents):
    check = zlib.crc32(kind + contents)
    return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", check)


def png_bytes(body, depth=8, width=4, height=3):
    """A PNG with these compressed pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", body), (b"IEND", b"")]
    return SIGNATURE + b"".join(chunk(*part) for part in chunks)


@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 99))
def test_what_was_written_is_read(height, width, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    np.testing.assert_array_equal(read_png(written(pixels), width, height), pixels)


PIXELS = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
SOUND = written(PIXELS)
MIDDLE = SOUND.index(b"IDAT") + 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (written(PIXELS, "GIF"), "no PNG"),
        (b"", "no PNG"),
        (png_bytes(zlib.compress(bytes(3 * 25)), depth=16), "4×3, 8-bit RGB"),
        (written(PIXELS[..., 0]), "4×3, 8-bit RGB"),
        (written(PIXELS[:2]), "4×3, 8-bit RGB"),
        (png_bytes(b"", width=1 << 30, height=1 << 30), "damaged"),
        (SOUND[:MIDDLE], "damaged"),
        (SOUND[:MIDDLE] + bytes(20) + SOUND[MIDDLE + 20 :], "damaged"),
        (png_bytes(b"no"), "damaged"),
        (png_bytes(zlib.compress(bytes(20))), "damaged"),
        (png_bytes(zlib.compress(b"\x05" * 39)), "damaged"),
    ],
    ids=["gif", "empty", "deep", "grey", "size", "bomb", "cut", "bits", "zlib", "few", "filter"],
)
def test_damaged_and_other_images_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        read_png(data, 4, 3)
