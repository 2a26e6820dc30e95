"""Capture of smoothed routers: ranks of their scores, weights of all experts in use, files."""

import pytest
import torch

from tests.models.tiny import batch, lively, tiny_model
from tieline.models import capture, find_routers, smooth_
from tieline.models.families import family_of
from tieline.models.router_output import read_output
from tieline.trace.record import identical_values
from tieline.trace.store import load_trace, save_trace

LAYOUTS = ("olmoe", "llama4", "jetmoe", "deepseek_v3", "gpt_oss")
"""Outputs of every layout but dbrx's; a bias and groups; experts that skip no slot."""


def _router_outputs(model, ids):
    """What every router returned, by ordinary hooks."""
    outputs, handles = {}, []
    for name, router in find_routers(model).items():

        def note(module, args, output, name=name):
            outputs[name] = read_output(family_of(module), module, (args, {}), output)

        handles.append(router.register_forward_hook(note))
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return outputs


def _trace(model, ids, **options):
    with torch.no_grad(), capture(model, **options) as recorder:
        for row in ids:
            model(input_ids=row[None])
    return recorder.trace()


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_ranks_are_those_of_top_k_and_the_weights_those_in_use(family):
    ids, model = batch(3, 16), lively(tiny_model(family))
    hard = _trace(model, ids)
    smooth_(model, epsilon={hard.layers[0].name: 0.5})
    soft, outputs = _trace(model, ids), _router_outputs(model, ids)
    first, before = soft.layers[0], hard.layers[0]  # its inputs are those of the original
    for name in ("scores", "near", "distance", "group_gap"):
        assert identical_values(getattr(first, name), getattr(before, name))
    k = first.facts.k
    same = first.experts[:, :k].sort(dim=1).values == before.experts[:, :k].sort(dim=1).values
    assert bool(same.all())
    output = outputs[first.name]._make(x.cpu() for x in outputs[first.name])
    assert torch.equal(first.used.long(), (output.weights != 0).sum(dim=1))
    assert first.used.max() > k
    weights, experts = first.combined()
    recorded = torch.zeros_like(output.logits).scatter_add(
        1, experts.long(), weights.to(output.logits)
    )
    expected = torch.zeros_like(output.logits).scatter_add(1, output.ids, output.weights)
    if first.group_gap is None:  # experts of other groups that fade in are among no kept rank
        assert torch.allclose(recorded, expected.to(recorded), atol=1e-6)
    assert soft.layers[1].smoothed is False


def test_a_trace_of_a_smoothed_model_is_written_and_read(tmp_path):
    model = lively(tiny_model("olmoe"))
    smooth_(model, epsilon=0.5)
    trace = _trace(model, batch(2, 12))
    save_trace(trace, tmp_path / "trace")
    assert identical_values(load_trace(tmp_path / "trace"), trace)
    assert trace.layers[0].faded.shape[1] == trace.layers[0].scores.shape[1] - 2
