"""The KL of two runs, live and with routes replayed."""

from copy import deepcopy

import pytest
import torch

import tieline as tl
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.compared_sides import ModelSide
from tieline.analysis.diff import diff_models
from tieline.analysis.replay_split import replay_split
from tieline.run.ranks import Ranks


@pytest.fixture(scope="module")
def model():
    return lively(tiny_model("olmoe"))


def test_a_run_is_at_no_distance_from_itself(model):
    split = replay_split(ModelSide(model), ModelSide(model), Ranks.share_batches(None, [batch()]))
    assert (split.live.kl, split.ids.kl, split.both.kl) == (0, 0, 0)
    assert (split.tokens, split.changed) == (22, 0)


def test_what_routers_alone_do_is_undone_by_replay(model):
    """Only the routers are rounded: A's experts and weights give A's output back."""
    rough = ModelSide(model, "int4_group", "router")
    split = replay_split(
        ModelSide(model), rough, Ranks.share_batches(None, [batch(), batch(3, 20)])
    )
    assert split.changed > 0
    assert split.live.kl > split.ids.kl > 10 * abs(split.both.kl)
    assert split.by_both == pytest.approx(1, abs=1e-6)
    assert split.live.error is not None


def test_what_experts_do_stays(model):
    other = deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "experts" in name:
                parameter.mul_(1.5)
    split = replay_split(ModelSide(model), ModelSide(other), Ranks.share_batches(None, [batch()]))
    assert split.both.kl > 0.2 * split.live.kl


def test_diff_splits_its_kl_on_request():
    result = tl.diff("demo", "demo", dtype_b="bf16-emulated", tokens=256, replay=True)
    assert result.replay is not None
    assert result.replay.live.kl == pytest.approx(result.metrics["kl"], rel=1e-6)
    assert result.metrics["kl:ids replayed"] == result.replay.ids.kl
    assert result.observations[-1].case == "replay"
    with pytest.raises(tl.TielineError, match="replay is for two models"):
        tl.diff(result.traces[0], result.traces[1], replay=True)


def test_the_other_side_runs_in_batches_of_its_own(model):
    ids = list(batch(6, 12))
    copy = deepcopy(model)
    comparison = diff_models(ModelSide(model), ModelSide(copy), ids, batch_size=1, batch_size_b=4)
    same = diff_models(ModelSide(model), ModelSide(copy), ids, batch_size=3)
    assert comparison.tokens.anywhere.total == same.tokens.anywhere.total == 72
    assert comparison.metrics["kl"] < 1e-9
    assert comparison.traces[1].documents.tolist() == same.traces[1].documents.tolist()
    with pytest.raises(tl.TielineError, match="a trace has no batches"):
        tl.diff(comparison.traces[0], comparison.traces[1], batch_size_b=2)
