"""Selection scores (activations, biases, precision, groups) and combine weights of shares."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.models.tiny import tiny_model
from tests.strategies import score_matrices
from tieline.core.errors import UnsupportedModelError
from tieline.models import GroupRule, RouterFamily, family_of, find_routers
from tieline.models.router_rule import (
    GroupLimit,
    at_least_float32,
    column_weights,
    group_limit,
    restrict_to_groups,
    selection_scores,
    without_underflow,
)


class _Router(nn.Module):
    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, hidden_states, expert_bias=None):
        return None


LOGITS = torch.tensor([[0.5, -1.0, 2.0]])
BIAS = torch.tensor([0.25, 0.5, -0.5])
CALL = ((None,), {})


def _select(router=None, call=CALL, logits=LOGITS, **facts):
    return selection_scores(
        RouterFamily("own", ("_Router",), **facts), router or _Router(), logits, call
    )


@pytest.mark.parametrize("ranked", ["logits", "softmax", "sigmoid"])
def test_the_bias_is_added_in_the_units_that_are_ranked(ranked):
    expected = {"logits": LOGITS, "softmax": LOGITS.softmax(-1), "sigmoid": LOGITS.sigmoid()}
    plain = _select(ranked=ranked)
    biased = _select(_Router(b=BIAS[None]), ranked=ranked, bias="b")
    assert plain.units == biased.units == ranked
    assert torch.equal(plain.scores, expected[ranked])
    assert torch.equal(biased.scores, expected[ranked] + BIAS)
    assert plain.bias is None
    assert torch.equal(biased.bias, BIAS)


@pytest.mark.parametrize("call", [((None, BIAS), {}), ((None,), {"expert_bias": BIAS})])
def test_a_bias_that_is_an_argument_is_found_by_name(call):
    assert torch.equal(_select(call=call, bias_argument="expert_bias").bias, BIAS)


def test_a_bias_argument_may_be_missing_and_a_flag_may_switch_it_off():
    assert _select(bias_argument="expert_bias").bias is None
    off = _Router(use=False)
    call = ((None, BIAS), {})
    assert _select(off, call, bias_argument="expert_bias", bias_flag="use").bias is None


def test_a_router_ranks_in_float32_or_in_its_own_precision():
    logits = LOGITS.bfloat16()
    single, own_precision = (
        _select(logits=logits, ranked="sigmoid"),
        _select(logits=logits, ranked="sigmoid", own_dtype=True),
    )
    assert torch.equal(single.scores, logits.float().sigmoid())
    assert torch.equal(own_precision.scores, logits.sigmoid())
    assert own_precision.rounding == 2**-7 > single.rounding == 2**-23


def test_probabilities_rank_as_logits_and_stay_finite():
    logs = _select(logits=torch.tensor([[0.75, 0.25, 0.0]]), probabilities=True).scores
    assert torch.equal(logs[0, :2], torch.tensor([0.75, 0.25]).log())
    assert -90 < logs[0, 2] < -80


def test_activations_are_known_by_their_class():
    facts = {"ranked": "activation", "activation": "score_fn"}
    assert _select(_Router(score_fn=nn.Sigmoid()), **facts).units == "sigmoid"
    with pytest.raises(UnsupportedModelError, match="Tanh"):
        _select(_Router(score_fn=nn.Tanh()), **facts)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_group": 4, "topk_group": 2}, GroupLimit(4, 2, "top2sum", -math.inf)),
        ({"num_group": 4, "topk_group": 4}, None),
        ({"num_group": None, "topk_group": None}, None),
    ],
)
def test_groups_count_only_where_they_limit(values, expected):
    assert group_limit(GroupRule(), _Router(**values)) == expected
    assert group_limit(None, _Router(**values)) is None


def test_groups_may_wait_for_a_method_and_change_what_is_ranked():
    groups = GroupRule(when=("method", "grouped"), ranked="softmax")
    for method, units in (("grouped", "softmax"), ("greedy", "logits")):
        router = _Router(num_group=3, topk_group=1, method=method)
        assert _select(router, groups=groups).units == units


@given(
    score_matrices(min_experts=6, max_experts=6),
    st.integers(1, 2),
    st.sampled_from(["max", "top2sum"]),
    st.sampled_from([-math.inf, 0.0]),
)
def test_the_group_gap_and_the_chosen_groups_match_their_definition(scores, chosen, rule, fill):
    limit = GroupLimit(3, chosen, rule, fill)
    ids = torch.zeros(len(scores), 1, dtype=torch.long)
    best = {"max": lambda run: max(run), "top2sum": lambda run: sum(run)}[rule]
    for t, row in enumerate(scores.tolist()):
        totals = [best(row[g * 2 : g * 2 + 2]) for g in range(3)]
        order = sorted(range(3), key=lambda g: -totals[g])
        ids[t] = 2 * order[0]
        limited, gap = restrict_to_groups(scores[t : t + 1], ids[t : t + 1], limit)
        assert gap.item() == totals[order[chosen - 1]] - totals[order[chosen]]
        outside = [2 * g + e for g in order[chosen:] for e in range(2)]
        if gap.item() > 0:
            assert limited[0, outside].tolist() == [fill] * len(outside)
            inside = sorted(set(range(6)) - set(outside))
            assert torch.equal(limited[0, inside], scores[t, inside])


def test_of_groups_that_tie_those_with_chosen_experts_were_chosen():
    scores = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    for expert in (0, 2):
        limit = GroupLimit(2, 1, "max", -math.inf)
        limited, gap = restrict_to_groups(scores, torch.tensor([[expert]]), limit)
        assert limited.isfinite().nonzero()[:, 1].tolist() == [expert, expert + 1]
        assert gap.item() == 0


def test_of_groups_that_tie_one_that_the_choice_contradicts_was_not_chosen():
    scores = torch.tensor([[0.875, 0.75, 0.8125, 0.125, 0.5, 0.4375, 0.0, 0.0]])
    limit = GroupLimit(4, 2, "top2sum", -math.inf)
    for ids, tied in (([0, 1], 2), ([0, 2], 1)):  # 0.8125 of group 1 is above 0.75 of group 0
        limited, gap = restrict_to_groups(scores, torch.tensor([ids]), limit)
        assert limited.isfinite().nonzero()[:, 1].tolist() == [0, 1, 2 * tied, 2 * tied + 1]
        assert gap.item() == 0


def test_short_floats_are_widened_exactly_and_long_ones_kept():
    assert at_least_float32(torch.tensor([1.5], dtype=torch.bfloat16)).dtype == torch.float32
    assert at_least_float32(torch.tensor([1.5], dtype=torch.float64)).dtype == torch.float64


IDS = torch.tensor([[4, 1, 6]])
SHARE = torch.tensor([[1.0, 0.5, 0.0]])
SMALL = torch.full((1, 8), -14.0)  # so small a sigmoid that what is added to a sum matters
MASS = torch.sigmoid(torch.tensor(-14.0)).item()


def column_weights_of(family, logits, **settings):
    router = next(iter(find_routers(tiny_model(family)).values()))
    for name, value in settings.items():
        setattr(router, name, value)
    return column_weights(family_of(router), router, logits, IDS, SHARE)[0].tolist()


@pytest.mark.parametrize(
    ("family", "added"), [("lfm2_moe", 1e-6), ("muse_spark", 1e-15), ("deepseek_v3", 1e-20)]
)
def test_sigmoids_are_divided_by_their_sum_and_what_the_family_adds(family, added):
    scale = {"routed_scaling_factor": 1.0}
    weights = column_weights_of(family, SMALL, norm_topk_prob=True, **scale)
    expected = [MASS / (1.5 * MASS + added), 0.5 * MASS / (1.5 * MASS + added), 0.0]
    assert weights == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "ernie4_5_vl_moe"])
def test_a_sum_below_the_least_is_not_divided_by(family):
    """Softmax of equal logits: 1/8 each, 3/16 in all."""
    assert column_weights_of(family, SMALL, norm_min=0.5) == pytest.approx([0.25, 0.125, 0.0])
    assert column_weights_of(family, SMALL, norm_min=0.1) == pytest.approx([2 / 3, 1 / 3, 0.0])


def test_a_norm_of_any_order_divides():
    for order, size in ((1, 1.5), (2, 1.25**0.5)):
        weights = column_weights_of("dbrx", SMALL, moe_normalize_expert_weights=order)
        assert weights == pytest.approx([1 / size, 0.5 / size, 0.0])
    weights = column_weights_of("dbrx", SMALL, moe_normalize_expert_weights=None)
    assert weights == pytest.approx([0.125, 0.0625, 0.0])


def test_logits_whose_softmax_underflows_tie_and_rows_that_are_not_finite_stay():
    rows = [[0.0, -50.0, -100.0], [0.0, -100.0, -torch.inf], [torch.inf, -200.0, 0.0]]
    floor = math.log(3 * torch.finfo(torch.float32).tiny)
    raised = [[0.0, -50.0, floor], [0.0, floor, -torch.inf], [torch.inf, -200.0, 0.0]]
    assert torch.equal(without_underflow(torch.tensor(rows)), torch.tensor(raised))
    assert without_underflow(torch.tensor([[torch.nan, -200.0]]))[0, 1] == -200.0


@pytest.mark.cpu("on an accelerator the answer would have to be read back")
def test_logits_of_which_none_underflows_are_not_copied():
    logits = torch.tensor([[0.0, -80.0], [3.0, 2.0]])
    assert without_underflow(logits) is logits
