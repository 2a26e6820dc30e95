"""Pretrained models: folders, names that are not cached, and errors if they cannot be loaded."""

import pytest

from tieline.lab.training import data_files as pretrained
from tieline.lab.training.data_files import DataError, fetch_checkpoint, local_checkpoint


def test_a_folder_is_its_own_checkpoint(tmp_path):
    assert local_checkpoint(str(tmp_path)) == tmp_path
    assert fetch_checkpoint(str(tmp_path)) == tmp_path


def test_what_is_not_here_is_none_without_a_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert local_checkpoint("someone/no-such-model-here") is None
    assert local_checkpoint("no/such/folder/here") is None


def test_only_safetensors_and_text_are_asked_for_and_failure_is_told(monkeypatch):
    calls = []

    def download(name, allow_patterns, local_files_only=False):
        calls.append((name, tuple(allow_patterns), local_files_only))
        raise OSError("no route")

    monkeypatch.setattr(pretrained, "snapshot_download", download)
    with pytest.raises(DataError, match=r"'a/b'.*no route.*`hf download a/b`"):
        fetch_checkpoint("a/b")
    assert [call[2] for call in calls] == [True, False]
    assert not any("bin" in pattern for _, patterns, _ in calls for pattern in patterns)
