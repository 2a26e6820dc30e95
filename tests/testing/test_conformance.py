"""Every planted fault must be found, and nothing else may be."""

import pytest
import torch

from tieline.core.errors import ParameterError
from tieline.testing import RULES, assert_router, check_router, logit_cases, router_habits
from tieline.testing.conformance import MANY_ROWS, PATTERNS, import_router
from tieline.testing.conformance import SIZES as ALL_SIZES

SIZES = ((8, 2), (16, 4))
NAMES = (
    "normal",
    "negative",
    "huge",
    "equal",
    "nearly-equal",
    "tied",
    "spaced",
    "signed-zeros",
    "masked",
    "too-few-left",
    "all-masked",
    "one-nan",
    "no-rows",
    "one-row",
)


def sound(logits, k):
    weights, ids = logits.softmax(dim=-1).topk(k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def other_ties(logits, k):
    """Of equal scores the higher index."""
    order = logits.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :k]
    ids = logits.shape[1] - 1 - order
    return ids, logits.gather(1, ids).softmax(dim=-1)


def forgets_the_last(logits, k):
    return sound(logits[:, :-1], k)


def keeps_the_sum(logits, k):
    weights, ids = logits.softmax(dim=-1).topk(k, dim=-1)
    return weights, ids


def doubles_an_expert(logits, k):
    weights, ids = sound(logits, k)
    return weights, ids[:, :1].expand(-1, k)


def out_of_range_at_nan(logits, k):
    weights, ids = sound(logits, k)
    return weights, ids.masked_fill(logits.isnan().any(1, keepdim=True), logits.shape[1])


def swaps_weights(logits, k):
    weights, ids = sound(logits, k)
    return weights.flip(1), ids


def overwrites(logits, k):
    answer = sound(logits, k)
    logits.zero_()
    return answer


def looks_at_others(logits, k):
    return sound(logits - logits.mean(0) if len(logits) > 1 else logits, k)


def breaks_on_no_rows(logits, k):
    logits.amax()
    return sound(logits, k)


def starts_at_zero(logits, k):
    """The accumulator of the largest score starts at 0, so that negative scores never win."""
    scores = logits.clamp(min=0)
    ids = scores.topk(k, dim=-1).indices
    return ids, sound(logits, k)[0]


def signed_bits(logits, k):
    """Ranks the bits as integers, which reverses negative numbers."""
    ids = logits.view(torch.int32).topk(k, dim=-1).indices
    return ids, logits.gather(1, ids).softmax(dim=-1)


def in_bf16(logits, k):
    return sound(logits.bfloat16().float(), k)


@pytest.mark.parametrize("router", [sound, other_ties])
def test_sound_routers_conform_whatever_they_do_at_ties(router):
    rule = RULES["softmax"] if router is sound else RULES["softmax-of-chosen"]
    conformance = assert_router(router, rule, SIZES, names=NAMES)
    assert len(conformance.cases) == len(NAMES) * len(SIZES)
    if router is other_ties:
        assert sum(case.ties for case in conformance.cases) > 50


@pytest.mark.parametrize(
    ("router", "verdict"),
    [
        (forgets_the_last, "wrong choice"),
        (starts_at_zero, "wrong choice"),
        (signed_bits, "wrong choice"),
        (in_bf16, "wrong choice"),
        (looks_at_others, "wrong choice"),
        (keeps_the_sum, "wrong weights"),
        (swaps_weights, "wrong weights"),
        (doubles_an_expert, "invalid ids"),
        (out_of_range_at_nan, "invalid ids"),
        (overwrites, "changed input"),
        (breaks_on_no_rows, "raised"),
    ],
)
def test_a_planted_fault_is_found(router, verdict):
    conformance = check_router(router, RULES["softmax"], SIZES, names=NAMES)
    assert verdict in {case.verdict for case in conformance.deviations}
    assert router is not signed_bits or "negative-E8-k2" in conformance.explanation
    with pytest.raises(AssertionError, match=verdict):
        assert_router(router, RULES["softmax"], SIZES, names=NAMES)


def test_a_choice_that_depends_on_the_batch_only_at_ties_is_found():
    def router(logits, k):
        answer = other_ties(logits, k)
        return answer if len(logits) > 1 else (stable(logits, k), answer[1])

    def stable(logits, k):
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]

    report = check_router(router, RULES["softmax-of-chosen"], [(8, 2)], names=["equal"])
    assert [case.verdict for case in report.cases] == ["depends on the batch"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda logits, k: None, "expected tensors"),
        (lambda logits, k: logits[:, :k], "expected ids"),
        (lambda logits, k: logits.topk(k).indices[:, 1:], "expected the shape"),
    ],
)
def test_another_form_is_named(answer, message):
    report = check_router(answer, RULES["softmax"], [(8, 2)], names=["normal"])
    assert report.cases[0].verdict == "invalid form"
    assert message in report.cases[0].reason


def test_ids_alone_are_enough():
    report = check_router(lambda z, k: z.topk(k).indices, RULES["softmax"], [(8, 2)], names=NAMES)
    assert report.conforms
    assert {case.weight_error for case in report.cases} == {None}


def test_routers_are_loaded_by_path():
    assert import_router("tests.testing.test_conformance:sound") is sound
    for path in ("torch", "no_such_module:f", "torch:no_such_name", "torch:__version__"):
        with pytest.raises(ParameterError):
            import_router(path)


def grouped_router(logits, k, bias, groups, k_groups):
    """DeepSeek-V3's lines."""
    shares = logits.sigmoid()
    scores = shares + bias
    of_groups = scores.unflatten(1, (groups, -1)).topk(2).values.sum(-1)
    kept = torch.zeros_like(of_groups).scatter(1, of_groups.topk(k_groups).indices, 1).bool()
    inside = kept.repeat_interleave(logits.shape[1] // groups, dim=1)
    ids = scores.masked_fill(~inside, -torch.inf).topk(k).indices
    weights = shares.gather(1, ids)
    return ids, 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20)


def no_groups(logits, k, bias, **groups):
    ids = (logits.sigmoid() + bias).topk(k).indices
    weights = logits.sigmoid().gather(1, ids)
    return ids, 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20)


def biased_weights(logits, k, bias, **groups):
    ids, _ = grouped_router(logits, k, bias, **groups)
    weights = (logits.sigmoid() + bias).gather(1, ids)
    return ids, 2.5 * weights / weights.sum(-1, keepdim=True)


def test_groups_and_bias_are_judged():
    rule, sizes = RULES["deepseek-v3"], ((16, 4), (64, 8))
    assert_router(grouped_router, rule, sizes, names=NAMES)
    verdicts = {
        router: {case.verdict for case in check_router(router, rule, sizes, names=NAMES).deviations}
        for router in (no_groups, biased_weights)
    }
    assert "wrong choice" in verdicts[no_groups]
    assert verdicts[biased_weights] == {"wrong weights"}


def cases(experts=8, k=2, rule="softmax"):
    return {case.name: case for case in logit_cases(RULES[rule], [(experts, k)])}


def test_every_case_is_there_with_its_shape():
    drawn = cases(64, 8)
    assert set(drawn) == set(PATTERNS)
    assert drawn["no-rows"].logits.shape == (0, 64)
    assert drawn["many-rows"].logits.shape == (MANY_ROWS, 64)
    assert all(case.logits.dtype == torch.float32 for case in drawn.values())


@pytest.mark.parametrize(("experts", "k"), ALL_SIZES)
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


def test_habits_of_a_router_that_takes_the_higher_index():
    habits = router_habits(other_ties, RULES["softmax-of-chosen"], 16, 4)
    assert (habits.ties, habits.zeros) == ("higher index", "higher index")
    assert habits.ordered
    assert habits.same_bits
    assert (habits.masked, habits.nan) == ("NaN", "NaN")


def test_habits_of_a_stable_router_that_masks_what_is_not_finite():
    def router(logits, k):
        finite = logits.nan_to_num(nan=-torch.inf, posinf=1e30, neginf=-torch.inf)
        ids = finite.sort(dim=1, descending=True, stable=True).indices[:, :k]
        return ids, finite.gather(1, ids).softmax(dim=-1).nan_to_num(0.0)

    habits = router_habits(router, RULES["softmax-of-chosen"], 16, 4)
    assert (habits.ties, habits.masked, habits.infinite) == ("lower index", "zero", "finite")
    assert (habits.nan, habits.nan_chosen) == ("finite", 0.0)


def test_a_router_that_raises_says_so():
    def router(logits, k):
        raise RuntimeError("no")

    assert router_habits(router, RULES["softmax"], 8, 2).ties == "raises"


def test_bits_that_depend_on_the_batch_are_seen():
    def router(logits, k):
        weights, ids = sound(logits, k)
        return weights * (1 if len(logits) > 1 else 1 + 2**-23), ids

    assert not router_habits(router, RULES["softmax"], 8, 2).same_bits
