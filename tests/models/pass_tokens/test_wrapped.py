"""Wrapped models, called by name and by position, under capture, replay and the monitor."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models.replay.test_replay import other_trace
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.monitor import RoutingMonitor
from tieline.models import capture
from tieline.models.replay import replay

IDS = batch()
MASK = torch.ones_like(IDS)
MASK[1, 9:] = 0


class Adapter(nn.Module):
    """Hands all arguments on, as wrappers of adapters do."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


class Step(nn.Module):
    """Takes a batch as one argument, as modules of trainers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch, mask=None):
        return self.model(batch, attention_mask=mask)


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {
    "adapter": Adapter,
    "batch": Step,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "both": lambda model: nn.parallel.DistributedDataParallel(Adapter(model)),
    "FSDP": sharded,
}


@pytest.fixture(scope="module")
def one_process():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_arguments_by_position_are_those_by_name(wrapper):
    plain = lively(tiny_model("olmoe")).requires_grad_(True)
    routes = other_trace(plain)
    with torch.no_grad(), replay(plain, routes):
        expected = plain(input_ids=IDS, attention_mask=MASK).logits
    with torch.no_grad(), capture(plain) as recorder:
        plain(input_ids=IDS, attention_mask=MASK)
    trace = recorder.trace()
    model = WRAPPERS[wrapper](plain)

    calls = [lambda: model(IDS, MASK)]
    if wrapper != "batch":
        calls.append(lambda: model(input_ids=IDS, attention_mask=MASK))
    for call in calls:
        with torch.no_grad():
            with capture(model) as recorder:
                call()
            with replay(model, routes) as replayed:
                assert torch.allclose(call().logits, expected, atol=1e-6)
            options = {"every": 1, "training_only": False, "check_losses": False}
            with RoutingMonitor(model, per_layer=True, **options) as monitor:
                call()
                scalars = monitor.step()
        again = recorder.trace()
        assert torch.equal(again.tokens, trace.tokens)
        assert torch.equal(again.positions, trace.positions)
        for layer, plain_layer in zip(again.layers, trace.layers, strict=True):
            assert torch.equal(layer.experts, plain_layer.experts)
        assert again.provenance["model_type"] == "olmoe"
        assert (replayed.recorded, replayed.tokens) == (21, 21)
        gaps = torch.cat([layer.gap for layer in trace.layers])
        assert scalars["routing/gap_p50"] == pytest.approx(gaps.quantile(0.5).item(), rel=0.1)


def test_the_auxiliary_loss_of_a_wrapped_model_is_checked():
    model = nn.DataParallel(lively(tiny_model("olmoe")).requires_grad_(True).train()).train()
    with RoutingMonitor(model, every=1), pytest.warns(UserWarning, match="silently off"):
        model(IDS)
