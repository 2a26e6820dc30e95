"""Which precision a model computes in, and that a result tells it from the stored one."""

import warnings

import pytest
import torch
from transformers import OlmoeConfig

import tieline
from tests.models.tiny import tiny_model
from tieline.core.errors import PrecisionWarning
from tieline.models.demo import DEMO_FOLDER, load_demo_tokenizer
from tieline.models.model import Model
from tieline.models.number_formats import (
    HALF_UNITS,
    computed_dtype,
    cpu_has_capability,
    stored_dtype,
    stored_precision,
)
from tieline.report.tables import precision_text

CPU, HALVES = torch.device("cpu"), (torch.bfloat16, torch.float16)


@pytest.fixture
def no_units(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_f": True})


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    tiny_model("olmoe").to(torch.bfloat16).save_pretrained(folder)
    load_demo_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stored", HALVES)
def test_auto_is_float32_on_a_cpu_without_the_units_and_says_so(no_units, stored):
    with pytest.warns(PrecisionWarning, match="computing in float32") as caught:
        assert computed_dtype("auto", stored, CPU) is torch.float32
    assert len(caught) == 1
    assert str(stored).removeprefix("torch.") in str(caught[0].message)


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("unit", [name for names in HALF_UNITS.values() for name in names])
def test_auto_is_what_is_stored_exactly_where_its_units_are(monkeypatch, stored, unit):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {unit: True})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        dtype = computed_dtype("auto", stored, CPU)
    assert dtype == ("auto" if unit in HALF_UNITS[stored] else torch.float32)


def test_what_is_asked_for_is_done_and_so_is_what_needs_no_units(no_units):
    assert computed_dtype("bf16", torch.bfloat16, CPU) is torch.bfloat16
    assert computed_dtype("auto", torch.float32, CPU) == "auto"
    assert computed_dtype("auto", None, CPU) == "auto"
    assert computed_dtype("auto", torch.bfloat16, torch.device("meta")) == "auto"


def test_all_devices_are_the_cpu_where_there_is_no_other(no_units, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert computed_dtype("auto", torch.bfloat16, None) == "auto"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(PrecisionWarning):
        assert computed_dtype("auto", torch.bfloat16, None) is torch.float32


def test_a_torch_that_cannot_tell_has_no_units(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not cpu_has_capability(HALF_UNITS[torch.bfloat16])


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_the_stored_precision_is_that_of_the_configuration(dtype):
    config = OlmoeConfig()
    config.dtype = dtype
    assert stored_dtype(config) is torch.bfloat16
    config.dtype = None
    assert stored_dtype(config) is None


def test_a_checkpoint_in_bf16_is_computed_exactly_in_float32(no_units, in_bf16):
    stored = Model.open(in_bf16, dtype="bf16").module
    with pytest.warns(PrecisionWarning):
        computed = Model.open(in_bf16).module
    assert (stored.dtype, computed.dtype) == (torch.bfloat16, torch.float32)
    assert stored_precision(stored) == stored_precision(computed) == "bfloat16"
    for a, b in zip(stored.parameters(), computed.parameters(), strict=True):
        assert torch.equal(a.float(), b)


def test_the_demo_model_computes_in_float32_on_every_cpu(no_units):
    loaded = Model.open()  # no warning, which would be an error here
    assert (loaded.module.dtype, stored_precision(loaded.module)) == (torch.float32, _stored_demo())
    provenance = tieline.inspect(loaded, tokens=64, jumps=False).provenance
    assert (provenance["dtype"], provenance["stored_dtype"]) == ("float32", _stored_demo())


def test_the_demo_model_in_bf16_is_that_of_its_folder():
    ids = torch.arange(1, 65, device="cpu")[None]
    by_name, by_folder = Model.open("demo", dtype="bf16"), Model.open(DEMO_FOLDER, dtype="bf16")
    with torch.no_grad():
        assert torch.equal(by_name.module(ids).logits, by_folder.module(ids).logits)


def test_a_model_that_was_not_loaded_here_tells_no_stored_precision():
    assert stored_precision(tiny_model("olmoe")) is None
    assert precision_text({"dtype": "float32"}) == "float32"
    assert precision_text({"dtype": "float32", "stored_dtype": "float32"}) == "float32"
    assert precision_text({}) == ""


def _stored_demo():
    return str(stored_dtype(OlmoeConfig.from_pretrained(DEMO_FOLDER))).removeprefix("torch.")
