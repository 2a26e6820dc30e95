"""Where a run exceeds sound runs: nothing in sound noise, and each planted group by its name."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.planted import trace_of
from tieline.analysis.excess_over_sound_runs import RunLayerNoise, find_excess, round_scores_like
from tieline.analysis.score_noise import LayerNoise
from tieline.analysis.token_groups import ComparedTokens, prefix_repeats, token_clusters

DOCUMENTS, LENGTH, RANKS, EXPERTS, K = 16, 64, 8, 16, 3
TOKENS = DOCUMENTS * LENGTH
POSITIONS = np.tile(np.arange(LENGTH), DOCUMENTS)
NUMBERS = np.repeat(np.arange(DOCUMENTS), LENGTH)
SCALE = np.exp(np.random.default_rng(0).normal(size=(TOKENS, 1)))
TOLERANCE = 0.2


def kept_experts(seed):
    ranked = np.random.default_rng(seed).random((TOKENS, EXPERTS)).argsort(1)
    return ranked[:, :RANKS]


KEPT = [kept_experts(seed) for seed in (1, 2)]
IDS = np.random.default_rng(3).zipf(1.5, TOKENS) % 50
ROWS = NUMBERS % 4
DECODED = (POSITIONS >= 3 * LENGTH // 4 - NUMBERS % 3) & (NUMBERS % 5 > 0)
SUBJECT = ComparedTokens(NUMBERS, POSITIONS, IDS, [x[:, :K] for x in KEPT], KEPT, ROWS, DECODED)


def layer(noise, kept, flipped=None):
    """A layer whose scores differ by this noise."""
    difference = SCALE * noise
    variance = difference.var(1, ddof=1)
    common = np.ones(noise.shape, dtype=bool)
    record = LayerNoise(difference, common, kept, variance, np.log(variance), 1e-9, 1.0)
    return RunLayerNoise.from_noise(record, np.zeros(TOKENS, bool) if flipped is None else flipped)


def normal(seed):
    return np.random.default_rng(seed).normal(size=(TOKENS, RANKS))


def run(seed, draw=normal, louder=(1.0, 1.0)):
    """Two layers of noise, each scaled by its entry of `louder`."""
    return [
        layer(np.reshape(times, (-1, 1)) * draw(10 * seed + i), KEPT[i])
        for i, times in enumerate(louder)
    ]


REFERENCES = [run(seed) for seed in range(1, 6)]


def excess_of(run_b):
    return find_excess(run_b, REFERENCES, SUBJECT, TOLERANCE)


def student(seed):
    draws = np.random.default_rng(seed).standard_t(2.5, size=(TOKENS, RANKS))
    return 0.87 * draws


def spiky(rate, factor):
    def draw(seed):
        generator = np.random.default_rng(seed)
        rare = generator.random((TOKENS, RANKS)) < rate
        return generator.normal(size=(TOKENS, RANKS)) * np.where(rare, factor, 1.0)

    return draw


@pytest.mark.parametrize(
    "draw",
    [normal, student, spiky(1e-2, 100), spiky(1e-3, 30), spiky(1e-4, 10)],
    ids=["normal", "t2.5", "spikes 1e-2", "spikes 1e-3", "spikes 1e-4"],
)
def test_sound_noise_of_any_tail_exceeds_nothing(draw):
    for seed in range(20, 26):
        assert excess_of(run(seed, draw)) == ()


def test_quieter_runs_and_equal_documents_exceed_nothing():
    assert excess_of(run(30, louder=(0.3, 0.5))) == ()
    half = np.where(NUMBERS % 2 == 0, 1e-6, 1.0)
    assert excess_of(run(31, louder=(half, half))) == ()


def test_noise_that_is_louder_everywhere_has_no_name():
    first, *_ = excess_of(run(40, louder=(1.6, 1.6)))
    assert (first.layer, first.kind, first.number) == (0, "all", None)
    assert first.ratio == pytest.approx(1.6, rel=0.1)
    assert first.statistic > first.limit >= 6.0


@pytest.mark.parametrize(
    ("kind", "number", "members"),
    [
        ("last position", None, POSITIONS == LENGTH - 1),
        ("first position", None, POSITIONS == 0),
        ("document", 5, NUMBERS == 5),
        ("batch row", 2, ROWS == 2),
        ("decode", None, DECODED),
        ("expert", 4, (KEPT[0][:, :K] == 4).any(1)),
        ("token", int(np.bincount(IDS).argmax()), np.bincount(IDS).argmax() == IDS),
    ],
)
def test_planted_groups_are_named(kind, number, members):
    loud = np.where(members, 8.0, 1.0)
    layers = (1.0, loud) if kind == "expert" else (loud, 1.0)
    first, *_ = excess_of(run(50, louder=layers))
    assert (first.kind, first.number) == (kind, number)
    assert first.layer == (1 if kind == "expert" else 0)
    assert first.ratio == pytest.approx(8, rel=0.3)


def test_a_group_has_no_name_where_the_other_tokens_are_too_loud_as_well():
    of_documents = np.select([NUMBERS == 14, NUMBERS == 15], [10.0, 30.0], 1.0)
    times = of_documents * np.where(POSITIONS == LENGTH - 1, 30.0, 1.0)
    assert excess_of(run(51, louder=(times, times)))[0].kind == "all"


def test_one_row_of_a_router_is_named_where_tokens_are_quiet():
    noise = normal(60) * np.where(KEPT[0] == 7, 12.0, 1.0)
    (excess,) = excess_of([layer(noise, KEPT[0]), *run(61)[1:]])
    assert (excess.layer, excess.kind, excess.number) == (0, "row", 7)


def test_a_row_that_is_louder_than_quiet_tokens_alone_is_not_named():
    noise = 0.2 * normal(60) * np.where(KEPT[0] == 7, 5.0, 1.0)
    assert excess_of([layer(noise, KEPT[0]), *run(61)[1:]]) == ()


def test_few_tokens_far_beyond_the_references_are_found():
    def loud_at(share):
        chosen = np.random.default_rng(70).random(TOKENS) < share
        return excess_of(run(71, louder=(np.where(chosen, 60.0, 1.0), 1.0)))

    first, *_ = loud_at(0.03)
    assert (first.layer, first.kind) == (0, "all")
    assert loud_at(0.003) == ()


def test_tokens_that_share_too_few_experts_are_far_beyond_the_references():
    def strangers(count):
        layers = run(72)
        wrong = (NUMBERS == 9) & (count > POSITIONS)
        level = np.where(wrong, np.nan, layers[0].level)
        return excess_of([layers[0]._replace(level=level, strange=wrong), layers[1]])

    first, *_ = strangers(20)
    assert (first.layer, first.kind, first.number) == (0, "document", 9)
    assert strangers(4) == ()


def test_tokens_after_a_common_prompt_are_one_draw():
    ids = np.where(POSITIONS < 3, POSITIONS, 100 + np.arange(TOKENS))
    tokens = SUBJECT._replace(ids=ids)
    repeats = prefix_repeats(tokens)
    assert repeats.tolist() == np.where(POSITIONS < 3, DOCUMENTS, 1).tolist()
    unlucky = run(80, louder=(np.where(POSITIONS == 0, 4.0, 1.0), 1.0))
    (excess,) = find_excess(unlucky, REFERENCES, SUBJECT._replace(ids=None), TOLERANCE)
    assert excess.kind == "first position"
    assert find_excess(unlucky, REFERENCES, tokens, TOLERANCE) == ()


def test_tokens_of_equal_scores_are_one_draw():
    common = int(np.bincount(IDS).argmax())
    unlucky = run(81, louder=(np.where(common == IDS, 4.0, 1.0), 1.0))
    (excess,) = find_excess(unlucky, REFERENCES, SUBJECT, TOLERANCE)
    assert (excess.kind, excess.number) == ("token", common)
    by_id, alone = np.bincount(IDS)[IDS], np.ones(TOKENS, dtype=int)
    assert (
        find_excess(unlucky, REFERENCES, SUBJECT._replace(equal_scores=[by_id, alone]), 0.2) == ()
    )
    excess = find_excess(unlucky, REFERENCES, SUBJECT._replace(equal_scores=[alone, by_id]), 0.2)
    assert len(excess) == 1


def test_references_are_rounded_as_the_scores_of_the_run_are():
    scores = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    exact, coarse = trace_of([scores]), trace_of([scores.bfloat16().float()])
    assert torch.equal(
        round_scores_like([exact], exact)[0].layers[0].scores, exact.layers[0].scores
    )
    rounded = round_scores_like([exact], coarse)[0].layers[0].scores
    assert torch.equal(rounded, exact.layers[0].scores.bfloat16().float())


@pytest.mark.parametrize(("rounds_scores", "rounds_bias"), [(True, False), (False, True)])
def test_references_are_rounded_below_the_selection_bias_that_they_share_with_the_run(
    rounds_scores, rounds_bias
):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(64, 8, generator=generator)
    bias = 10 + torch.rand(8, generator=generator)
    coarse_scores = scores.bfloat16().float() if rounds_scores else scores + 1e-3
    coarse_bias = bias.bfloat16().float() if rounds_bias else bias

    def biased(plain, bias):
        trace = trace_of([plain + bias])
        return replace(trace, layers=[replace(trace.layers[0], bias=bias)])

    exact, run_b = biased(scores, bias), biased(coarse_scores, coarse_bias)
    (layer,) = round_scores_like([exact], run_b)[0].layers
    experts = layer.experts
    expected = scores.bfloat16().float() if rounds_scores else scores
    rounded_scores = expected.gather(1, experts) + coarse_bias[experts]
    assert torch.allclose(layer.scores, rounded_scores, rtol=0, atol=3e-6)
    unlike = biased(scores + 1e-3, bias.roll(1))
    assert torch.allclose(
        round_scores_like([exact], unlike)[0].layers[0].scores, exact.layers[0].scores, atol=3e-6
    )


def test_what_follows_a_flip_is_not_judged_again():
    early = (POSITIONS == 2) & (NUMBERS < 12)
    after = np.where((NUMBERS < 12) & (POSITIONS >= 2), 9.0, 1.0)
    quiet, loud = run(70, louder=(1.0, after))
    assert excess_of([quiet, loud]) != ()
    flipped = quiet._replace(flipped=early.astype(np.int8))
    assert excess_of([flipped, loud]) == ()


def test_tokens_before_the_first_flip_may_be_as_loud_as_their_layer_is():
    quiet = np.where(POSITIONS < 8, 1.0, 4.0)  # noise of a late layer grows where flips reach
    references = [run(seed, louder=(1.0, quiet)) for seed in range(1, 6)]
    first, even = run(90, louder=(1.0, 4.0))
    flipped = first._replace(flipped=(POSITIONS == 8).astype(np.int8))
    assert find_excess([flipped, even], references, SUBJECT, TOLERANCE) == ()
    assert find_excess([first, even], references, SUBJECT, TOLERANCE) != ()
    (louder,) = find_excess(
        [flipped, run(91, louder=(1.0, 12.0))[1]], references, SUBJECT, TOLERANCE
    )
    assert (louder.layer, louder.kind) == (1, "all")


def test_without_scores_flips_are_counted():
    def flips(seed, rate):
        flipped = np.random.default_rng(seed).random(TOKENS) < rate
        return [RunLayerNoise.from_noise(None, flipped)] * 2

    references = [
        [x._replace(flipped=y.flipped) for x, y in zip(z, flips(i, 0.05), strict=True)]
        for i, z in enumerate(REFERENCES)
    ]
    assert find_excess(flips(80, 0.05), references, SUBJECT, TOLERANCE) == ()
    first, *_ = find_excess(flips(81, 0.2), references, SUBJECT, TOLERANCE)
    assert first.kind == "all"
    assert first.ratio == pytest.approx(4, rel=0.3)


def test_few_documents_are_cut_into_stretches():
    few = SUBJECT._replace(documents=NUMBERS // 8)
    assert len(np.unique(token_clusters(few))) >= 12
    assert len(np.unique(token_clusters(SUBJECT))) == DOCUMENTS


def test_tokens_are_strange_unless_a_group_of_experts_changed():
    common = np.ones((TOKENS, RANKS), dtype=bool)
    common[5, 2:] = False
    variance = np.ones(TOKENS)
    noise = LayerNoise(normal(1), common, KEPT[0], variance, np.log(variance), 1e-9, 1.0)
    flipped = np.zeros(TOKENS, dtype=bool)
    layer_noise = RunLayerNoise.from_noise(noise, flipped)
    assert np.flatnonzero(layer_noise.strange).tolist() == [5]
    assert np.isnan(layer_noise.level[5])
    assert not RunLayerNoise.from_noise(noise, flipped, has_groups=True).strange.any()
    assert layer_noise.at_tokens(np.array([5, -1, 4])).strange.tolist() == [True, False, False]
