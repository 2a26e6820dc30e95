"""Tensors of torch.save are read without running code; what needs a pickle is refused."""

import struct
import zipfile

import numpy as np
import pytest
import torch

from tieline.core.errors import TraceError
from tieline.trace import import_trace
from tieline.trace.readers import read_routes

IDS = torch.rand(30, 3, 16, generator=torch.Generator().manual_seed(0)).argsort(2)[..., :4]
WEIGHTS = torch.rand(30, 3, 4)


def layer(number):
    return {"topk_ids": IDS[:, number], "topk_weights": WEIGHTS[:, number]}


@pytest.mark.parametrize(
    ("value", "weighted"),
    [
        (IDS, False),
        ([IDS[:, i] for i in range(3)], False),
        ({f"layer_{i}": IDS[:, i] for i in (2, 0, 1)}, False),
        ({i: layer(i) for i in range(3)}, True),
        ({"routed_experts": IDS, "weights": WEIGHTS}, True),
        ({"topk_ids": IDS, "topk_weights": WEIGHTS, "step": 7}, True),
    ],
)
def test_every_layout_of_tensors(tmp_path, value, weighted):
    torch.save(value, tmp_path / "a.pt")
    routes = read_routes(tmp_path / "a.pt")
    assert np.array_equal(routes.experts, IDS.numpy())
    assert (routes.weights is not None) == weighted
    assert routes.producer == "torch"
    assert import_trace(tmp_path / "a.pt").n_tokens == 30


def test_a_folder_of_one_file_per_layer(tmp_path):
    for number in (10, 2, 0):
        torch.save(layer({0: 0, 2: 1, 10: 2}[number]), tmp_path / f"layer_{number}.pt")
    routes = read_routes(tmp_path)
    assert np.array_equal(routes.experts, IDS.numpy())
    assert np.allclose(routes.weights, WEIGHTS.numpy())
    assert routes.layer_names == ("layers.0", "layers.2", "layers.10")


class Hostile:
    def __reduce__(self):
        return (print, ("code of the file ran",))


@pytest.mark.parametrize("legacy", [False, True])
def test_what_needs_a_pickle_is_one_message(tmp_path, capsys, legacy):
    torch.save({"a": Hostile()}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(TraceError, match="is a pickle") as caught:
        import_trace(tmp_path / "a.pt")
    assert "\n" not in str(caught.value)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1, dtype=torch.int64).expand(1 << 30, 4, 4), "not stored whole"),
        ([IDS[:, 0], IDS[:9, 1]], r"1: \(tokens, k\) is \(9, 4\)"),
        ({"layer_0": {"a": IDS[:, 0]}}, "no field of experts"),
        ({"layer_0": WEIGHTS[:, 0]}, "needs integers"),
        ([], "one per layer"),
        ("text", "one per layer"),
    ],
)
def test_tensors_that_are_no_routes(tmp_path, value, message):
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "a.pt")


def test_a_packed_archive_is_refused(tmp_path):
    torch.save(torch.zeros(1 << 20, 1, 2, dtype=torch.int64), tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(TraceError, match="states"):
        import_trace(tmp_path / "b.pt")


def test_an_archive_that_spans_disks_is_refused(tmp_path):
    file = tmp_path / "routes.pt"
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 2)
    file.write_bytes(locator + b"PK\5\6" + bytes(18))
    with pytest.raises(TraceError, match=r"routes\.pt: cannot be read: BadZipFile"):
        import_trace(file)
