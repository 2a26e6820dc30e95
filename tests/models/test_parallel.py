"""Which models can be spread how, decided on skeletons, before any weight is read."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig

from tests.ranks import Ranks
from tieline.core.errors import ParameterError, UnsupportedModelError
from tieline.models import FAMILIES
from tieline.models.demo import DEMO_FOLDER
from tieline.models.model import Model
from tieline.models.parallel import (
    PARALLEL,
    check_parallel,
    check_rounding,
    distributed_config,
    local_shard,
)


def skeleton(kind=OlmoeConfig, **changes):
    small = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_experts": 8}
    config = kind(**{**small, "num_attention_heads": 4, "num_key_value_heads": 4, **changes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def ranks(monkeypatch):
    """Only the number of processes is asked for here; nothing is sent."""

    def of(count):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: count)

    return of


def test_an_unknown_way_and_a_way_without_processes_are_refused():
    assert check_parallel(None) == 1
    with pytest.raises(ParameterError, match="one of data, tp, ep, pp, fsdp, got 'xx'"):
        check_parallel("xx")
    with pytest.raises(ParameterError, match="'tp' needs several processes: start with torchrun"):
        Model.open(DEMO_FOLDER, parallel="tp")


@pytest.mark.parametrize("way", PARALLEL)
def test_every_way_is_a_configuration_of_transformers(ranks, way):
    ranks(2)
    config = distributed_config(way, skeleton())
    if way == "data":
        assert config is None
        return
    sizes = {"tp": config.tp_size, "ep": config.ep_size, "pp": config.pp_size}
    sizes["fsdp"] = config.fsdp_size
    assert {name for name, size in sizes.items() if size == 2} == {way, *(["tp"] * (way == "ep"))}


@pytest.mark.parametrize(
    ("way", "count", "changes", "message"),
    [
        ("ep", 3, {}, "8 experts of 'olmoe' cannot be cut over 3 processes"),
        ("tp", 5, {}, "24 intermediate features of an expert of 'olmoe' cannot be cut over 5"),
        ("pp", 5, {}, "4 layers of 'olmoe' in 5 stages leave one without a router"),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused(ranks, way, count, changes, message):
    ranks(count)
    with pytest.raises(UnsupportedModelError, match=message):
        distributed_config(way, skeleton(**changes))


def test_heads_are_cut_only_where_the_plan_cuts_them(ranks):
    ranks(2)
    few = {"num_key_value_heads": 1, "moe_intermediate_size": 24, "head_dim": 8}
    with pytest.raises(UnsupportedModelError, match="1 key_value_heads of 'qwen3_moe'"):
        distributed_config("tp", skeleton(Qwen3MoeConfig, **few))
    assert distributed_config("tp", skeleton(num_key_value_heads=1)) is not None  # gathers them


def test_a_stage_without_a_router_is_refused(ranks):
    ranks(2)
    sparse = {"moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [2, 3]}
    with pytest.raises(UnsupportedModelError, match="leave one without a router"):
        distributed_config("pp", skeleton(Qwen3MoeConfig, **sparse))


@pytest.mark.parametrize("way", ["tp", "ep", "pp", "fsdp"])
def test_a_family_without_a_plan_is_refused(ranks, monkeypatch, way):
    ranks(2)
    model = skeleton()
    olmoe = replace(FAMILIES["OlmoeTopKRouter"], pipeline_checked=False)
    monkeypatch.setitem(FAMILIES, "OlmoeTopKRouter", olmoe)
    for name in ("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan"):
        setattr(model, name, {})
    with pytest.raises(UnsupportedModelError, match=f"'{way}': transformers has no such plan"):
        distributed_config(way, model)


def test_a_plan_that_renumbers_the_choice_is_refused(ranks):
    ranks(2)
    model = skeleton()
    model._ep_plan = {"model.layers.*.mlp.gate": "ep_router"}
    with pytest.raises(UnsupportedModelError, match=r"renumbers the router's choice .* take tp"):
        distributed_config("ep", model)


@pytest.mark.parametrize("way", PARALLEL)
def test_low_precision_is_emulated_where_the_numbers_to_round_are_whole(ranks, way):
    ranks(2)
    if way in ("data", "ep"):
        check_rounding(way, "an audit")
        return
    with pytest.raises(ParameterError, match=f"{way!r}: an audit emulates .*: take data or ep"):
        check_rounding(way, "an audit")


def _parts():
    mesh, full = DeviceMesh("cpu", [0]), torch.arange(24.0).view(2, 3, 4)
    results = []
    for placement, axis in ((Shard(0), -1), (Replicate(), -1), (Shard(2), -1), (Shard(2), 1)):
        tensor = DTensor.from_local(full.clone(), mesh, [placement])
        try:
            local_shard(tensor, axis).data = -full
            results.append(tensor.to_local().equal(-full))
        except UnsupportedModelError as problem:
            results.append(str(problem))
    return results


def test_a_part_is_changed_for_the_whole_tensor_unless_it_is_cut_along_a_scale():
    assert local_shard(torch.ones(3)).tolist() == [1, 1, 1]
    group = Ranks(1)
    try:
        ((first, second, along, across),) = group.run(_parts)
    finally:
        group.close()
    assert first is True
    assert second is True
    assert "cut over processes along the axis that shares a scale" in along
    assert across is True
