"""The PNG reader against a writer of this file that uses every filter."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.training.fetch import DataError
from tieline.training.image_data import SIGNATURE, read_png


def filtered(kind, row, above):
    """A row by the definition of its filter, byte by byte."""
    done = bytearray([kind])
    for place, value in enumerate(row):
        left = row[place - 3] if place >= 3 else 0
        up, corner = above[place], above[place - 3] if place >= 3 else 0
        guess = left + up - corner
        nearest = min((left, up, corner), key=lambda one: abs(guess - one))
        done.append((value - (0, left, up, (left + up) // 2, nearest)[kind]) % 256)
    return bytes(done)


def chunk(kind, contents):
    check = zlib.crc32(kind + contents)
    return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", check)


def written(pixels, kinds, *, depth=8, split=1):
    height, width, _ = pixels.shape
    rows = [bytes(width * 3), *(row.tobytes() for row in pixels)]
    body = zlib.compress(
        b"".join(filtered(kind, rows[at + 1], rows[at]) for at, kind in enumerate(kinds))
    )
    parts = [body[: len(body) // split], body[len(body) // split :]]
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return SIGNATURE + header + b"".join(chunk(b"IDAT", p) for p in parts) + chunk(b"IEND", b"")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 7), st.integers(0, 99))
def test_what_any_filters_wrote_is_read(kinds, width, seed):
    shape = (len(kinds), width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    np.testing.assert_array_equal(
        read_png(written(pixels, kinds, split=2), width, len(kinds)), pixels
    )


PIXELS = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
SOUND = written(PIXELS, [0, 1, 4])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GIF89a" + SOUND, "first eight"),
        (written(PIXELS, [0, 0, 0], depth=16), "4×3, 8-bit RGB"),
        (SOUND[:-4], "middle of a chunk"),
        (SOUND[:-12], "middle of a chunk"),
        (SOUND[:-30] + b"\xff" + SOUND[-29:], "damaged"),
        (written(PIXELS[:2], [0, 0]), "4×3"),
        (SIGNATURE + SOUND[8:33] + chunk(b"IDAT", b"no") + chunk(b"IEND", b""), "unpacked"),
        (
            SIGNATURE + SOUND[8:33] + chunk(b"IDAT", zlib.compress(bytes(9999)))
            + chunk(b"IEND", b""),
            "40 bytes of pixels, not 39",
        ),
        (
            SIGNATURE + SOUND[8:33] + chunk(b"IDAT", zlib.compress(b"\x05" * 39))
            + chunk(b"IEND", b""),
            "filter 5",
        ),
    ],
    ids=["gif", "deep", "cut", "no end", "bit", "size", "zlib", "bomb", "filter"],
)  # fmt: skip
def test_damaged_and_other_images_are_refused(data, words):
    with pytest.raises(DataError, match=words):
        read_png(data, 4, 3)
