"""Experts beside smoothed routers: only slots that are used are rows, and no bit changes."""

import pytest
import torch

from tests.models.tiny import batch, lively, tiny_model
from tieline.models import experts as room
from tieline.models.emulate import emulate
from tieline.models.families import find_routers
from tieline.models.smoothed_model import smooth_, smoothed_routers

FAMILIES = ["mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v3"]
GATES = {"projected": {}, "ramp": {"gate": "ramp"}, "wide ramp": {"gate": "ramp", "k_max": 4}}


def smoothed_record(model, gate):
    record = smooth_(model, epsilon=0.3, **GATES[gate])
    record.undo()
    return record


def output(model, record, ids):
    with torch.inference_mode(), smoothed_routers(model, record, list(find_routers(model))):
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("number_format", [None, "bf16", "int8"])
def test_no_bit_depends_on_empty_slots(family, gate, number_format, monkeypatch):
    model, ids = lively(tiny_model(family)), batch()
    model.set_experts_implementation("grouped_mm")
    record = smoothed_record(model, gate)

    def both():
        yield output(model, record, ids)
        monkeypatch.setattr(room, "_used_slots", lambda self, plain, *call: plain(self, *call))
        yield output(model, record, ids)

    if number_format is None:
        with_used, with_all = both()
    else:
        with torch.inference_mode(), emulate(model, number_format, region="all"):
            with_used, with_all = both()
    assert torch.equal(with_used, with_all)


def test_rows_are_the_slots_in_use(monkeypatch):
    model, ids, rows, slots = lively(tiny_model("olmoe")), batch(), [], []
    model.set_experts_implementation("grouped_mm")
    record = smoothed_record(model, "wide ramp")
    used_slots, implementation = room._used_slots, room.ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def counted(self, plain, states, index, weights):
        slots.append(int((index < self.num_experts).sum()))
        assert index.numel() > slots[-1]
        return used_slots(self, plain, states, index, weights)

    def gathered(self, states, index, weights):
        rows.append(index.numel())
        return implementation(self, states, index, weights)

    monkeypatch.setattr(room, "_used_slots", counted)
    monkeypatch.setitem(room.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", gathered)
    output(model, record, ids)
    assert rows == slots
    assert len(rows) == len(find_routers(model))


def test_calls_with_gradients_run_as_always(monkeypatch):
    model, rows = lively(tiny_model("olmoe")), []
    model.set_experts_implementation("grouped_mm")
    record, implementation = (
        smoothed_record(model, "wide ramp"),
        room.ALL_EXPERTS_FUNCTIONS["grouped_mm"],
    )
    monkeypatch.setitem(
        room.ALL_EXPERTS_FUNCTIONS._global_mapping,
        "grouped_mm",
        lambda self, *call: rows.append(call[1].shape[1]) or implementation(self, *call),
    )
    with smoothed_routers(model, record, list(find_routers(model))):
        model(input_ids=batch())
    assert set(rows) == {4}
