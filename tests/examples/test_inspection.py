"""The worked example of the documentation, on few tokens."""

import re


def test_a_quantised_router_is_priced(example):
    code, out, err = example("router_precision", "512")
    assert code == 0, err
    kept = [float(x) for x in re.findall(r"([\d.]+) % of choices kept", out)]
    assert len(kept) == 3
    assert kept[0] < 95 < kept[2]  # int4, int8
    assert len(re.findall(r"layers [\d, ]+: \d+ % of the damage", out)) == 3
    assert "28,672 bytes more" in out
