import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.errors import ParameterError
from tieline.testing import RULES, RouterRule, rule_named

GROUPED = RouterRule(
    "sigmoid", "sigmoid", bias=True, groups=3, k_groups=2, group_score="top2sum", scale=2.5
)


def brute_force(rule, scores, k):
    """Every set that some order of equal scores gives, groups included."""
    experts = range(len(scores))
    if not rule.groups:
        return {frozenset(s) for s in itertools.combinations(experts, k) if _is_top(s, scores)}
    size = len(scores) // rule.groups
    runs = [scores[g * size : (g + 1) * size] for g in range(rule.groups)]
    best = [max(r) if rule.group_score == "max" else sum(sorted(r)[-2:]) for r in runs]
    sets = set()
    for groups in itertools.combinations(range(rule.groups), rule.k_groups):
        if _is_top(groups, best):
            inside = [e for e in experts if e // size in groups]
            for chosen in itertools.combinations(inside, k):
                left = [scores[e] for e in inside if e not in chosen]
                if not left or min(scores[e] for e in chosen) >= max(left):
                    sets.add(frozenset(chosen))
    return sets


def _is_top(chosen, scores):
    left = [score for i, score in enumerate(scores) if i not in chosen]
    return not left or min(scores[i] for i in chosen) >= max(left)


@given(
    rule=st.sampled_from(
        [
            RouterRule("logits"),
            RouterRule("logits", groups=3, k_groups=2),
            RouterRule("logits", groups=3, k_groups=1, group_score="top2sum"),
            RouterRule("logits", groups=2, k_groups=1),
        ]
    ),
    levels=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    k=st.integers(1, 3),
)
def test_a_choice_has_no_regret_if_and_only_if_some_order_of_equal_scores_gives_it(rule, levels, k):
    if not rule.serves(6, k):
        return
    logits = torch.tensor([levels], dtype=torch.float32)
    right = brute_force(rule, [float(level) for level in levels], k)
    scores, band = rule.scores(logits), rule.band(logits, k)
    assert float(band[0]) == 0
    for chosen in itertools.combinations(range(6), k):
        members = torch.zeros(1, 6, dtype=torch.bool)
        members[0, list(chosen)] = True
        accepted = float(rule.regret(members, scores, band)[0]) <= 0
        assert accepted == (frozenset(chosen) in right), (chosen, right)
    assert frozenset(rule.choice(logits, k)[0].tolist()) in right


def test_the_weights_are_those_of_the_formulas():
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    ids = torch.tensor([[2, 0]])
    exp = [math.exp(z) for z in (0.5, -1.0, 2.0, 0.0)]
    p = [e / sum(exp) for e in exp]
    sigma = [1 / (1 + math.exp(-z)) for z in (0.5, -1.0, 2.0, 0.0)]
    expected = {
        "softmax": [p[2] / (p[0] + p[2]), p[0] / (p[0] + p[2])],
        "softmax-raw": [p[2], p[0]],
        "softmax-of-chosen": [exp[2] / (exp[0] + exp[2]), exp[0] / (exp[0] + exp[2])],
        "sigmoid": [sigma[2] / (sigma[0] + sigma[2]), sigma[0] / (sigma[0] + sigma[2])],
        "sigmoid-raw": [sigma[2], sigma[0]],
        "deepseek-v2": [16 * p[2], 16 * p[0]],
    }
    for name, weights in expected.items():
        assert RULES[name].weights(logits, ids)[0].tolist() == pytest.approx(weights, rel=1e-14)


def test_a_bias_changes_the_choice_and_not_the_weights():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([-5.0, 0.0, 0.0])
    rule = RULES["sigmoid-biased"]
    assert rule.choice(logits, 2, bias).tolist() == [[1, 2]]
    ids = torch.tensor([[1, 2]])
    assert torch.equal(rule.weights(logits, ids), RULES["sigmoid"].weights(logits, ids))


def test_groups_are_served_only_where_they_divide_the_experts():
    assert GROUPED.serves(6, 4)
    assert not GROUPED.serves(6, 5)  # two groups of two
    assert not GROUPED.serves(7, 1)
    assert not GROUPED.serves(3, 1)  # the sum of two largest needs two


def test_rules_are_read_from_text():
    rule = rule_named("sigmoid,scale=2.5,groups=4,k_groups=2,renormalise=false,group_score=top2sum")
    assert (rule.scale, rule.groups, rule.k_groups, rule.renormalise) == (2.5, 4, 2, False)
    assert rule.group_score == "top2sum"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softmx", "no rule is called"),
        ("softmax,scales=2", "no field 'scales'"),
        ("softmax,scale=two", "scale is a number"),
        ("softmax,scale=nan", "must be finite"),
        ("softmax,bias=1", "true or false"),
        ("softmax,groups=4", "k_groups"),
    ],
)
def test_a_rule_that_is_none_is_refused(text, message):
    with pytest.raises(ParameterError, match=message):
        rule_named(text)
