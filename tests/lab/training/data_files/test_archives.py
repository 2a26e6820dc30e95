"""Members of planted archives, and files known by size and hash."""

import hashlib
import io
import tarfile
from dataclasses import replace

import pytest

from tieline.lab.training.data_files import DataError, DataFile, check_file, tar_members


def archive(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as packed:
        for name, contents, kind in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname = kind, len(contents), "/etc/passwd"
            packed.addfile(entry, io.BytesIO(contents))
    return path


def test_members_are_read_by_exact_name_and_nothing_is_unpacked(tmp_path):
    path = archive(
        tmp_path / "a.tgz",
        ("package/one", b"one", tarfile.REGTYPE),
        ("../escape", b"bad", tarfile.REGTYPE),
        ("package/two", b"two!", tarfile.REGTYPE),
    )
    before = sorted(tmp_path.rglob("*"))
    members = tar_members(path, {"package/two": 4, "package/one": 4})
    assert members == {"package/one": b"one", "package/two": b"two!"}
    assert sorted(tmp_path.rglob("*")) == before


def test_links_large_members_missing_ones_and_torn_archives_are_refused(tmp_path):
    path = archive(
        tmp_path / "a.tgz", ("one", b"12345", tarfile.REGTYPE), ("link", b"", tarfile.SYMTYPE)
    )
    with pytest.raises(DataError, match="lacks link"):
        tar_members(path, {"link": 10})
    with pytest.raises(DataError, match="one: 5 bytes, at most 4"):
        tar_members(path, {"one": 4})
    with pytest.raises(DataError, match=r"lacks other, two"):
        tar_members(path, {"two": 1, "other": 1})
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"no readable \.tar\.gz"):
        tar_members(path, {"one": 10})


def test_a_file_is_known_by_size_and_hash(tmp_path):
    path, data_file = tmp_path / "set", DataFile("set", hashlib.sha256(b"abc").hexdigest(), 3)
    with pytest.raises(DataError, match="no such file"):
        check_file(path, data_file)
    path.write_bytes(b"abc")
    assert check_file(path, data_file) == path
    with pytest.raises(DataError, match="3 bytes, expected 4"):
        check_file(path, replace(data_file, size=4))
    path.write_bytes(b"abd")
    with pytest.raises(DataError, match="SHA-256"):
        check_file(path, data_file)
