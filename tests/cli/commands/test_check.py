"""tieline check: exit codes, JSON and page."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

ENGINES = Path(__file__).parents[2] / "trace" / "fixtures" / "engines"


def test_a_sound_file_ends_with_0(tieline):
    code, out, _err = tieline("check", ENGINES / "vllm-one-request.npz")
    assert code == 0
    assert "No problems found" in out
    assert "263" in out


def test_an_unsound_file_ends_with_1_and_everything_is_written(tieline, tmp_path):
    ids = np.load(ENGINES / "vllm-sixteen-requests.npy").copy()
    ids[9, 2, 1] = ids[9, 2, 0]
    np.save(tmp_path / "a.npy", ids)
    page, data = tmp_path / "a.html", tmp_path / "a.json"
    code, _out, _err = tieline(
        "check", tmp_path / "a.npy", "--html", page, "--json", data, "--n-experts", 16
    )
    assert code == 1
    record = json.loads(data.read_text())
    assert record["sound"] is False
    assert [x["kind"] for x in record["findings"]] == ["duplicate-expert"]
    assert "row 9, layer 2" in page.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04K\x01.", "pickle"),
        (b"{}", "no field of routes"),
        (b'{"meta_info": {"routed_experts": "AAAA"}}', "no int32 numbers"),
        (b'{"meta_info": {"routed_experts": "AAAAAA=="}}', "--n-layers, --k"),
        (b"\x93NUMPY\x01\x00\xff\xff", "a.npy"),
        (gzip.compress(b'{"layer": 0}')[:-9], "a.json: cannot be read: EOFError"),
    ],
)
def test_bad_input_ends_with_2_one_message_and_nothing_written(tieline, tmp_path, content, message):
    path = tmp_path / ("a.npy" if content[:1] == b"\x93" else "a.json")
    path.write_bytes(content)
    code, _out, err = tieline("check", path, "--json", tmp_path / "out.json")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out.json").exists()
