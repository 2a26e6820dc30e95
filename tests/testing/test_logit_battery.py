import pytest
import torch

from tieline.core.errors import ParameterError
from tieline.testing import RULES, logit_cases
from tieline.testing.logit_battery import MANY_ROWS, PATTERNS, SIZES


def cases(experts=8, k=2, rule="softmax"):
    return {case.name: case for case in logit_cases(RULES[rule], [(experts, k)])}


def test_every_case_is_there_with_its_shape():
    drawn = cases(64, 8)
    assert set(drawn) == set(PATTERNS)
    assert drawn["no-rows"].logits.shape == (0, 64)
    assert drawn["many-rows"].logits.shape == (MANY_ROWS, 64)
    assert all(case.logits.dtype == torch.float32 for case in drawn.values())


@pytest.mark.parametrize(("experts", "k"), SIZES)
def test_each_case_has_what_its_name_says(experts, k):
    names = [name for name in PATTERNS if name != "many-rows"]
    drawn = {c.name: c.logits for c in logit_cases(RULES["softmax"], [(experts, k)], names=names)}
    assert bool((drawn["negative"] < 0).all())
    assert bool((drawn["equal"] == drawn["equal"][:, :1]).all())
    assert bool((drawn["all-masked"] == -torch.inf).all())
    assert bool((drawn["masked"].isfinite().sum(1) >= k).all())
    left = drawn["too-few-left"].isfinite().sum(1)
    assert bool((left >= 1).all())
    assert bool((left <= max(1, k - 1)).all())
    assert bool((drawn["one-nan"].isnan().sum(1) == 1).all())
    assert bool((drawn["plus-infinity"] == torch.inf).sum(1).eq(1).all())
    assert torch.equal(drawn["bf16-grid"], drawn["bf16-grid"].bfloat16().float())
    assert bool(drawn["signed-zeros"].signbit().logical_and(drawn["signed-zeros"] == 0).any())
    assert bool(drawn["near-overflow"].isfinite().all())
    spread = drawn["nearly-equal"] - 1
    assert float(spread.abs().max()) <= 4 * experts * torch.finfo(torch.float32).eps


def test_half_of_the_tied_tokens_tie_across_the_threshold():
    top = cases(16, 4)["tied"].logits.double().sort(dim=1, descending=True).values
    assert int((top[:, 3] == top[:, 4]).sum()) == len(top) // 2


def test_a_case_does_not_depend_on_which_others_are_drawn():
    some = next(iter(logit_cases(RULES["softmax"], [(8, 2)], names=["tied"])))
    assert torch.equal(some.logits, cases()["tied"].logits)


def test_sizes_that_groups_do_not_serve_are_left_out():
    sizes = {case.logits.shape[1] for case in logit_cases(RULES["deepseek-v3"], names=["normal"])}
    assert sizes == {16, 64, 128, 256, 384, 512}


def test_unknown_cases_and_sizes_are_refused():
    with pytest.raises(ParameterError, match="no cases are called"):
        list(logit_cases(RULES["softmax"], names=["nomal"]))
    with pytest.raises(ParameterError, match="1 <= k <= experts"):
        list(logit_cases(RULES["softmax"], [(4, 5)]))
