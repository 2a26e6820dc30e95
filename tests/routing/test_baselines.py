"""The layers we compare with: their definitions by brute force, and what they do not promise."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import mixture, ranking
from tests.strategies import dyadic_scores, seeds
from tieline import TielineError, TopK
from tieline.routing import (
    BASELINES,
    ExpertChoice,
    Experts,
    GShardTopK,
    Law,
    LinearRouter,
    Smear,
    SoftMoE,
    baseline,
    expert_capacity,
)

eight_scores = seeds.map(dyadic_scores)
SIZES = {"d_model": 6, "n_experts": 4, "k": 2, "d_hidden": 5}


def layer(name, **more):
    return baseline(name, **SIZES, **more).double().eval()


def expert_choice(rows, k):
    """Each expert's C best tokens, earlier ones first among equals."""
    tokens, experts = len(rows), len(rows[0])
    held = math.ceil(k * tokens / experts)
    total = [sum(math.exp(z) for z in row) for row in rows]
    p = [[math.exp(z) / s for z in row] for row, s in zip(rows, total, strict=True)]
    weights = [[0.0] * experts for _ in rows]
    for e in range(experts):
        for t in ranking([p[t][e] for t in range(tokens)])[: min(held, tokens)]:
            weights[t][e] = p[t][e]
    return weights


def seats(rows, k, held):
    """(token, expert) pairs that find room: all first choices, then all second ones, ..."""
    room, seated = dict.fromkeys(range(len(rows[0])), held), set()
    for rank in range(k):
        for t, row in enumerate(rows):
            e = ranking(row)[rank]
            if room[e]:
                room[e] -= 1
                seated.add((t, e))
    return seated


@given(seeds, st.integers(1, 9), st.integers(1, 4))
def test_expert_choice_is_its_definition(seed, tokens, k):
    torch.manual_seed(seed)
    scores = torch.randn(tokens, 4, dtype=torch.float64)  # no ties, at which exp rounds its own way
    weights = ExpertChoice(k)(scores)
    expected = torch.tensor(expert_choice(scores.tolist(), k), dtype=torch.float64)
    torch.testing.assert_close(weights, expected)
    assert ((weights != 0).sum(0) == expert_capacity(tokens, 4, k)).all()


@given(eight_scores, st.integers(1, 4), st.sampled_from([0.25, 0.5, 1.0, 1.5, math.inf]))
def test_gshard_seats_first_choices_first_and_drops_the_rest(scores, k, factor):
    gate = GShardTopK(k, capacity_factor=factor).eval()
    weights, full = gate(scores), TopK(k)(scores)
    finite = factor if math.isfinite(factor) else 8.0
    seated = seats(scores.tolist(), k, expert_capacity(*scores.shape, k, finite))
    for t, e in (full != 0).nonzero().tolist():
        expected = full[t, e] if (t, e) in seated else torch.zeros(())
        assert weights[t, e] == expected
    assert ((weights != 0) <= (full != 0)).all()


def test_gate_noise_is_of_the_stated_size_and_only_in_training():
    scores = torch.zeros(4000, 8, dtype=torch.float64)
    gate = GShardTopK(8, capacity_factor=math.inf, noise=2.0)
    logs = gate.train()(scores).log()
    spread = (logs - logs.mean(dim=1, keepdim=True)).pow(2).sum(1).div(7).mean().sqrt()
    assert spread.item() == pytest.approx(2.0 / 8, rel=0.02)
    assert torch.equal(gate.eval()(scores), TopK(8)(scores))


@pytest.mark.parametrize("gate", [ExpertChoice(2), GShardTopK(2, noise=0.0)])
def test_the_gates_say_and_show_that_they_depend_on_the_batch(gate):
    """The same token keeps or loses its expert with its neighbours; capacity is what does it."""
    assert gate.batch_dependent
    token_scores = torch.tensor([[4.0, 3.0, 0.0, 0.0]])
    crowd = torch.tensor([[9.0, 8.0, 0.0, 0.0]]).expand(7, 4)
    others = torch.tensor([[0.0, 0.0, 9.0, 8.0]]).expand(7, 4)
    among_rivals = gate(torch.cat([crowd, token_scores]))[-1]
    among_others = gate(torch.cat([others, token_scores]))[-1]
    assert (among_rivals[:2] == 0).all()
    assert (among_others[:2] > 0).all()


@pytest.mark.parametrize("gate", [ExpertChoice(2), GShardTopK(2, noise=0.0)])
@given(st.permutations(range(4)), st.integers(-8, 8))
def test_the_laws_that_remain(gate, order, shift):
    torch.manual_seed(5)
    scores = torch.randn(12, 4, dtype=torch.float64)
    assert gate.laws == {Law.SHIFT_INVARIANT, Law.EQUIVARIANT}
    torch.testing.assert_close(gate(scores[:, order]), gate(scores)[:, order])
    torch.testing.assert_close(gate(scores + shift), gate(scores))
    assert gate(scores).sum(1).min() < 1 - 1e-6


def test_no_other_gate_claims_to_depend_on_the_batch():
    from tests.routing.zoo import all_gates

    assert not any(gate.batch_dependent for gate in all_gates().values())


@pytest.mark.parametrize("normalise", [False, True])
def test_soft_moe_is_its_definition(normalise):
    experts = Experts(3, 6, 5).double()
    soft = SoftMoE(experts, slots=2, normalise=normalise).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    phi = soft.phi
    if normalise:
        soft.scale.data.fill_(3.0)
        z = 3 * (x / x.norm(dim=1, keepdim=True)) @ (phi / phi.norm(dim=1, keepdim=True)).T
    else:
        z = x @ phi.T
    held = z.softmax(dim=0).T @ x
    owner = torch.eye(3, dtype=torch.float64).repeat_interleave(2, dim=0)
    expected = z.softmax(dim=1) @ mixture(held, owner, experts)
    torch.testing.assert_close(soft(x), expected)
    torch.testing.assert_close(soft(torch.stack([x.flip(0), x]))[1], expected)


@pytest.mark.parametrize("bias", [False, True])
def test_smear_is_one_expert_of_averaged_parameters(bias):
    experts = Experts(3, 6, 5, bias=bias).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    smear = Smear(LinearRouter(6, 3).double(), experts)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    for sequence, y in zip(x, smear(x), strict=True):
        w = smear.router(sequence.mean(0)).softmax(-1)
        averaged = Experts(1, 6, 5, bias=bias).double()
        for mine, all_of_them in zip(averaged.parameters(), experts.parameters(), strict=True):
            mine.data = torch.tensordot(w, all_of_them.data, dims=1)[None]
        torch.testing.assert_close(y, mixture(sequence, torch.ones(4, 1).double(), averaged))


@pytest.mark.parametrize("name", ["soft_moe", "smear"])
def test_mixing_layers_depend_on_their_sequence_alone(name):
    built = layer(name)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(built(x)[1], built(x[1]))
    changed = x[1].clone()
    changed[-1] += 1  # a later token changes what an earlier one gets: not causal
    assert not torch.allclose(built(changed)[0], built(x[1])[0])
    assert built.batch_dependent


@pytest.mark.parametrize("name", ["soft_moe", "smear"])
def test_mixing_layers_are_continuous(name):
    built = layer(name)
    x, step = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    line = built(x + torch.linspace(-2, 2, 801).double().view(-1, 1, 1) * step)
    assert line.diff(dim=0).abs().max() < 50 * line.std() * 4 / 800


def test_a_layer_of_expert_choice_is_its_definition_over_the_whole_batch():
    """Experts choose among all tokens of a call (Zhou et al.): sequences do compete."""
    built = layer("expert_choice", bias=True)
    for parameter in built.experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    flat = x.flatten(0, 1)
    weights = expert_choice(built.router(flat).tolist(), 2)
    expected = mixture(flat, torch.tensor(weights, dtype=torch.float64), built.experts)
    torch.testing.assert_close(built(x), expected.view_as(x))
    torch.testing.assert_close(built(flat), expected)
    assert [sum(row[e] > 0 for row in weights) for e in range(4)] == [8, 8, 8, 8]  # ⌈2 · 15/4⌉
    assert not torch.allclose(built(x)[0], built(x[:1])[0])


MIXING = ("soft_moe", "expert_choice")


@pytest.mark.parametrize("name", MIXING)
@given(seeds, st.permutations(range(5)), st.permutations(range(3)))
def test_permuted_tokens_and_sequences_get_permuted_outputs(name, seed, tokens, sequences):
    torch.manual_seed(seed)
    built, x = layer(name), torch.randn(3, 5, 6, dtype=torch.float64)
    expected = built(x)[sequences][:, tokens]
    torch.testing.assert_close(built(x[sequences][:, tokens]), expected)


@pytest.mark.parametrize("name", MIXING)
@given(seeds, st.permutations(range(4)))
def test_the_order_of_the_experts_does_not_matter(name, seed, order):
    torch.manual_seed(seed)
    built, x = layer(name, bias=True), torch.randn(2, 5, 6, dtype=torch.float64)
    before = built(x)
    slots = [built.phi] if name == "soft_moe" else list(built.router.parameters())
    with torch.no_grad():
        for parameter in (*slots, *built.experts.parameters()):
            parameter.copy_(parameter[order])
    torch.testing.assert_close(built(x), before)


@pytest.mark.parametrize("name", MIXING)
def test_gradients_are_those_of_differences(name):
    torch.manual_seed(3)  # no token that an expert takes or leaves within the step
    built = layer(name, bias=True)
    values = list(built.parameters())
    names = [parameter_name for parameter_name, _ in built.named_parameters()]
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)

    def output(x, *parameters):
        return torch.func.functional_call(built, dict(zip(names, parameters, strict=True)), x)

    assert torch.autograd.gradcheck(output, (x, *values), fast_mode=True)


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_trains_every_parameter_and_takes_empty_batches(name):
    built = baseline(name, **SIZES, bias=True).double()
    built(torch.randn(2, 9, 6, dtype=torch.float64)).square().sum().backward()
    for parameter_name, parameter in built.named_parameters():
        assert parameter.grad.abs().sum() > 0, parameter_name
    assert built(torch.zeros(0, 9, 6, dtype=torch.float64)).shape == (0, 9, 6)
    assert built.float()(torch.randn(1, 1, 6)).isfinite().all()


def test_remoe_alone_does_not_depend_on_the_batch():
    built, x = layer("remoe"), torch.randn(9, 6, dtype=torch.float64)
    torch.testing.assert_close(built(x)[3], built(x[3:4])[0])
    assert not built.gate.batch_dependent


BAD = [
    (lambda: layer("best"), "name='best'"),
    (lambda: layer("smear", router="mlp"), "router='mlp'"),
    (lambda: layer("soft_moe", options={"slots": 0}), "slots=0"),
    (lambda: layer("gshard", options={"capacity_factor": 0.0}), "capacity factor"),
    (lambda: layer("gshard", options={"noise": -1.0}), "noise"),
    (lambda: ExpertChoice(0), "k must be"),
    (lambda: ExpertChoice(5)(torch.zeros(2, 4)), "k=5 of 4"),
    (lambda: Smear(LinearRouter(6, 3), Experts(4, 6, 5)), "do not fit"),
]


@pytest.mark.parametrize(("build", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_settings_are_refused(build, message):
    with pytest.raises(TielineError, match=message):
        build()


@pytest.mark.usefixtures("no_axis_checks")
@pytest.mark.parametrize("name", ["soft_moe", "smear"])
def test_a_token_without_a_sequence_is_refused(name):
    with pytest.raises(TielineError, match="must be"):
        layer(name)(torch.zeros(6).double())
