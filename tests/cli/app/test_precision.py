"""A command that computes in another precision than the stored one says so."""

import pytest
import torch

from tieline.models.demo import load_demo_model, load_demo_tokenizer


@pytest.mark.filterwarnings("default::tieline.core.errors.PrecisionWarning")
def test_computing_in_float32_for_want_of_units_is_one_line(monkeypatch, tmp_path, tieline):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    load_demo_model(torch.bfloat16).save_pretrained(tmp_path)
    load_demo_tokenizer().save_pretrained(tmp_path)
    code, out, err = tieline("inspect", tmp_path, "--tokens", 64)
    assert code == 0, err
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "computing in float32: the weights are stored in bfloat16" in notes[0]
    assert "float32 (stored in bfloat16)" in " ".join(out.split())
    assert "note: " not in tieline("inspect", tmp_path, "--tokens", 64, "--dtype", "bf16")[2]
