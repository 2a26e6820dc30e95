"""PNG images of 8 bits and three colours, read without an image library.

A row of a PNG holds differences to its neighbours a (left), b (above) and c (above left), by one of
five filters, all modulo 256:

    0   x                      3   x + ⌊(a + b) / 2⌋
    1   x + a                  4   x + the one of a, b, c that is nearest to a + b - c
    2   x + b

Filters 1 and 2 are sums along the row or from the row above; 3 and 4 go pixel by pixel.
"""

import struct
import zlib

import numpy as np
from jaxtyping import UInt8

from tieline.errors import require
from tieline.training.fetch import DataError

__all__ = ["read_png"]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOURS = 3


def read_png(data: bytes, width: int, height: int) -> UInt8[np.ndarray, "height width colours"]:
    """The pixels of an image whose size is known beforehand.

    Args:
        data: the bytes of the file.
        width: pixels of a row.
        height: number of rows.
    """
    require(data[:8] == SIGNATURE, "no PNG: the first eight bytes are others", DataError)
    chunks = _chunks(data)
    header, wanted = chunks.get(b"IHDR", b""), struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    require(
        header == wanted,
        f"a PNG of {width}×{height}, 8-bit RGB, is expected: {header!r}",
        DataError,
    )
    rows = _unpacked(chunks.get(b"IDAT", b""), height, 1 + COLOURS * width)
    return _unfiltered(rows[:, 0], rows[:, 1:].reshape(height, width, COLOURS))


def _chunks(data: bytes) -> dict[bytes, bytes]:
    """The contents of the chunks by type, those of one type joined; checksums are checked."""
    parts: dict[bytes, list[bytes]] = {}
    place = len(SIGNATURE)
    while b"IEND" not in parts:
        require(place + 12 <= len(data), "the PNG ends in the middle of a chunk", DataError)
        (length,) = struct.unpack_from(">I", data, place)
        whole = data[place + 4 : place + 8 + length]
        check = data[place + 8 + length : place + 12 + length]
        sound = len(check) == 4 and zlib.crc32(whole).to_bytes(4, "big") == check
        require(sound, f"a chunk of the PNG at byte {place} is damaged", DataError)
        parts.setdefault(whole[:4], []).append(whole[4:])
        place += 12 + length
    return {kind: b"".join(found) for kind, found in parts.items()}


def _unpacked(packed: bytes, height: int, row: int) -> UInt8[np.ndarray, "height row"]:
    """The filtered rows; no more bytes are unpacked than the image has."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(packed, height * row + 1)
    except zlib.error as problem:
        raise DataError(f"the pixels of the PNG cannot be unpacked: {problem}") from problem
    require(len(raw) == height * row, f"{len(raw)} bytes of pixels, not {height * row}", DataError)
    return np.frombuffer(raw, dtype=np.uint8).reshape(height, row)


def _unfiltered(kinds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    require(int(kinds.max(initial=0)) <= 4, f"unknown PNG filter {kinds.max(initial=0)}", DataError)
    pixels = np.where((kinds == 1)[:, None, None], rows.cumsum(axis=1, dtype=np.uint8), rows)
    for at in np.flatnonzero(kinds >= 2):
        above = pixels[at - 1] if at else np.zeros_like(pixels[0])
        if kinds[at] == 2:
            pixels[at] += above
        else:
            _by_pixel(pixels[at], above, _mean if kinds[at] == 3 else _nearest)
    return pixels


def _by_pixel(row: np.ndarray, above: np.ndarray, predict) -> None:
    left = corner = np.zeros(COLOURS, dtype=np.int16)
    for here, over in zip(row, above.astype(np.int16), strict=True):
        here += predict(left, over, corner).astype(np.uint8)
        left, corner = here.astype(np.int16), over


def _mean(left: np.ndarray, above: np.ndarray, corner: np.ndarray) -> np.ndarray:
    return (left + above) // 2


def _nearest(left: np.ndarray, above: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """Paeth's choice; of equally near ones left comes first, then above."""
    estimate = left + above - corner
    off = np.abs(estimate - np.stack([left, above, corner])).argmin(axis=0)
    return np.choose(off, [left, above, corner])
