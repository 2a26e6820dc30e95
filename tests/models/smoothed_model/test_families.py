"""Smooth routing on a small model of every family that can have it."""

import pytest
import torch

from tests.models.smoothing import (
    KINDS,
    SMOOTHED,
    Layer,
    double_model,
    largest_step,
    selection_scores,
    states,
    tie_router,
)
from tests.models.tiny import CHOSEN, EXPERTS, WIDTH, batch, lively, tiny_model
from tieline.core.ranking import ranked_scores
from tieline.models import find_routers, load_smoothed, smooth_, unsmooth_
from tieline.models.saved_models import changes_of
from tieline.models.smoothed_router import router_smoothing

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = [pytest.param(n, marks=[] if n in KINDS else [pytest.mark.slow]) for n in SMOOTHED]
RAMPS = ("deepseek_v3", "jetmoe", "llama4", "olmoe")
"""Families on which the ramp is tested always; on the others it is in the slow tier."""

BOTH = [pytest.param(n, "projected", marks=p.marks) for n, p in zip(SMOOTHED, ALL, strict=True)]
BOTH += [pytest.param(n, "ramp", marks=[] if n in RAMPS else pytest.mark.slow) for n in SMOOTHED]


def test_every_kind_of_scoring_is_among_the_families():
    assert set(KINDS) <= set(SMOOTHED)
    assert len(SMOOTHED) == 65


@pytest.mark.parametrize("family", SMOOTHED)
def test_a_vanishing_band_gives_the_original_and_undoing_it_exactly(family):
    model = double_model(family)
    keys = list(model.state_dict())
    with torch.inference_mode():
        plain = states(model(input_ids=batch()))
        record = smooth_(model, epsilon=1e-9)
        limit = states(model(input_ids=batch()))
        record.undo()
        again = states(model(input_ids=batch()))
        smooth_(model, epsilon=0.3)
        smooth = states(model(input_ids=batch()))
    assert list(model.state_dict()) == keys
    assert all(layer.smoothed for layer in record.layers)
    assert torch.equal(again, plain)
    assert torch.allclose(limit, plain, rtol=1e-5, atol=2e-6)  # some routers compute in float32
    assert not torch.allclose(smooth, plain, rtol=1e-5, atol=2e-6)


def assert_tied(scores, order):
    """What the router ranks has `order` + 1 equal numbers from the k-th on, all others apart."""
    ranked = ranked_scores(scores.double()[None], EXPERTS)[0]
    tied = ranked[CHOSEN - 1 : CHOSEN + order]
    assert (tied.max() - tied.min()).item() < 1e-6  # some routers compute in float32
    assert (ranked[CHOSEN - 2] - tied.max()).item() > 0.01
    assert (tied.min() - ranked[CHOSEN + order]).item() > 0.01


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("family", "gate"), BOTH)
def test_the_layer_is_continuous_on_a_whole_line_through_a_tie(family, gate, order):
    """A finer line has smaller steps in proportion; those of top-k stay as they are."""
    model = double_model(family)
    layer = Layer(model)
    generator = torch.Generator().manual_seed(3)
    point, direction = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    direction -= direction.dot(point) / point.dot(point) * point
    layer.tie(point, order)
    assert_tied(selection_scores(layer, point[None])[0], order)
    hard = [largest_step(layer, point, direction, steps) for steps in (512, 8192)]
    smooth_(model, epsilon=0.3, gate=gate)
    smooth = [largest_step(layer, point, direction, steps) for steps in (512, 8192)]
    assert hard[1] > 0.5 * hard[0]
    assert smooth[1] < smooth[0] / 10
    assert smooth[1] < hard[1] / 10


@pytest.mark.parametrize("family", ["jetmoe", "olmoe"])
def test_a_model_with_all_routers_smoothed_is_continuous_as_a_whole(family):
    """Sequences of one token; in jetmoe, attention is routed as well and its first router ties."""
    model = double_model(family)
    router = next(iter(find_routers(model).values()))
    for name, weight in model.named_parameters():
        if "experts" in name and "router" not in name:
            weight.mul_(8)  # as large as the residual stream
    generator = torch.Generator().manual_seed(3)
    point, direction = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    tie_router(router, point, 2)

    def outputs(points):
        with torch.no_grad():
            return model(inputs_embeds=points[:, None]).logits.flatten(1)

    hard = [largest_step(outputs, point, direction, steps) for steps in (256, 4096)]
    smooth_(model, epsilon=0.3)
    smooth = [largest_step(outputs, point, direction, steps) for steps in (256, 4096)]
    assert hard[1] > 0.5 * hard[0]
    assert smooth[1] < smooth[0] / 8


@pytest.mark.parametrize(("family", "gate"), BOTH)
def test_saved_and_loaded_it_is_smoothed_again(family, gate, tmp_path):
    model = lively(tiny_model(family))
    plain_class = type(model)
    record = smooth_(model, epsilon=0.25, **({"b": 2.0} if gate == "ramp" else {}))
    assert record.gate == gate
    model.save_pretrained(tmp_path)
    loaded = load_smoothed(tmp_path, plain_class)
    assert changes_of(loaded.config) == {"smooth": record.to_dict()}
    with torch.inference_mode():
        assert torch.equal(states(loaded(input_ids=batch())), states(model(input_ids=batch())))
    unsmooth_(loaded)
    unsmooth_(model)
    assert type(loaded) is type(model) is plain_class


@pytest.mark.parametrize("family", ALL)
def test_every_implementation_of_the_experts_leaves_unused_slots_out(family):
    """The same outputs with the index E and with weights of zero, under each implementation."""
    model = lively(tiny_model(family))
    if not model._can_set_experts_implementation():
        names = [None]
    else:
        names = ["eager", "batched_mm", "grouped_mm", "tieline"]
    smooth_(model, epsilon=0.3)
    handlers = [router_smoothing(m) for m in model.modules() if router_smoothing(m) is not None]
    outputs = []
    for name in names:
        if name is not None:
            model.set_experts_implementation(name)
        with torch.inference_mode():
            outputs.append(states(model(input_ids=batch())))
    for handler in handlers:  # no index skips: experts run with weight 0
        object.__setattr__(handler, "skip", type(handler.skip)(0, eager=False, config=None))
    with torch.inference_mode():
        outputs.append(states(model(input_ids=batch())))
    for output in outputs:
        assert output.isfinite().all()
        assert torch.allclose(output, outputs[-1], rtol=1e-4, atol=1e-5)
