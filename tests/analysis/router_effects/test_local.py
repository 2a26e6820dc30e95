"""Layer-local effects against running the parts by hand."""

import pytest
import torch

from tests.analysis.zoo import FAMILIES
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.router_effects import (
    LEAST_CHANCE,
    LocalEffects,
    _noisy_flip_shares,
    chosen_mask,
)
from tieline.core.ranking import topk_mask
from tieline.measure.noise_flips import flip_limits
from tieline.measure.rounding_flips import certified_by_router
from tieline.models.emulate import emulate, modular_routers
from tieline.models.families import family_of
from tieline.models.router_output import read_output
from tieline.run.condition import Perturbation
from tieline.run.observers import observing
from tieline.run.plan import Pass
from tieline.run.schedule import routed_set

INT4 = Perturbation("rounding", "int4")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_of_the_family_finds_what_the_router_chooses(family):
    router = next(iter(modular_routers(lively(tiny_model(family))).values()))
    x = torch.randn(200, 32)
    router_output = read_output(family_of(router), router, ((x,), {}), router(x))
    assert torch.equal(
        chosen_mask(router, router_output.logits, ((x,), {})), routed_set(router_output)
    )


def watched(model, runs, ids, number=0):
    """Logits of a clean pass under observation."""
    run = Pass(number)
    runs.on_start(run, ids)
    with torch.inference_mode(), observing(model, [runs], run):
        return model(input_ids=ids).logits


def keep_first(inputs, states):
    """Keep the inputs of the first call; later calls run some tokens again."""
    inputs.setdefault("x", states)


def states_of(output):
    return (output if torch.is_tensor(output) else output[0]).flatten(0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_flips_and_damage_are_those_of_the_block_run_by_hand(family):
    model, ids, block_inputs = lively(tiny_model(family)), batch(3, 16), {}
    routers = modular_routers(model)
    name = list(routers)[1]
    router, block = routers[name], model.get_submodule(name.rpartition(".")[0])
    handle = block.register_forward_pre_hook(lambda module, args: keep_first(block_inputs, args[0]))
    runs = LocalEffects(model, routers, [INT4], 0, 1.0, 1)
    clean = watched(model, runs, ids)
    handle.remove()
    assert torch.equal(clean, model(input_ids=ids).logits)  # looking changes nothing
    states = block_inputs["x"]
    with torch.inference_mode():
        before, y = routers[name](states.flatten(0, 1)), states_of(block(states))
        with emulate(router, "int4"):
            after, z = router(states.flatten(0, 1)), states_of(block(states))
    sets = [out[2].sort(dim=1).values for out in (before, after)]
    flipped = (sets[0] != sets[1]).any(dim=1)
    effect = runs.effects[INT4, name]
    assert effect.flip_count == int(flipped.sum()) > 0
    jumps = (z - y).norm(dim=1) / y.norm(dim=1) * flipped
    damage = torch.cat(effect.damage.sums)
    assert torch.allclose(damage.float(), jumps.view(3, 16).sum(dim=1).cpu(), rtol=1e-3)
    assert effect.flips.mean().value == pytest.approx(flipped.double().mean().item())


def test_noise_is_drawn_until_there_are_enough_flips_of_the_predicted_number():
    model, ids = lively(tiny_model("olmoe")), batch(4, 30)
    noise = Perturbation("score noise", 0.02)
    routers = modular_routers(model)
    runs = LocalEffects(model, routers, [noise], 0, 4000.0, 1)
    watched(model, runs, ids)
    for name in routers:
        effect = runs.effects[noise, name]
        assert effect.flip_count > 3000
        measured, predicted = effect.flips.mean().value, effect.low.mean().value
        assert measured == pytest.approx(predicted, rel=0.05)
        assert effect.trials % ids.numel() == 0


def test_tokens_for_which_no_noise_is_drawn_never_flip():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 8, generator=generator)
    rule = lambda scores: topk_mask(scores, 2)  # noqa: E731
    ranked = logits.double().sort(dim=1, descending=True).values.cpu()
    chance = flip_limits(ranked, 2, 0.05, 0).high
    possible, everyone = chance > LEAST_CHANCE, torch.ones_like(chance, dtype=torch.bool)
    assert 20 < int(possible.sum()) < 180
    drawn = [
        _noisy_flip_shares(rule, logits, some, 0.05, 4000, torch.Generator().manual_seed(1))
        for some in (everyone, possible)
    ]
    assert drawn[0][~possible].sum() == 0 == drawn[1][~possible].sum()
    error = (chance * (1 - chance) / 4000).sqrt()
    for shares in drawn:
        assert ((shares - chance).abs() <= 5 * error + 1e-3).all()


def test_hits_count_the_tokens_of_each_expert():
    model, ids = lively(tiny_model("mixtral")), batch(2, 10)
    runs = LocalEffects(model, modular_routers(model), [], 0, 1.0, 1)
    for number in range(2):
        watched(model, runs, ids, number)
    assert all(int(hits.sum()) == 2 * 2 * ids.numel() for hits in runs.hits.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_uncertified_tokens_are_those_of_the_product_with_its_bias(family):
    model, ids, router_inputs = lively(tiny_model(family)), batch(3, 16), {}
    name, router = list(modular_routers(model).items())[1]
    bias = getattr(router, "bias", None)
    handle = router.register_forward_pre_hook(
        lambda module, args: keep_first(router_inputs, args[0])
    )
    watched(model, LocalEffects(model, modular_routers(model), [], 0, 1.0, 1), ids)
    handle.remove()
    x = router_inputs["x"].reshape(-1, router.weight.shape[1])
    with torch.inference_mode():
        scores = x[:1].double() @ router.weight.double().T
        if bias is not None:
            scores = scores + bias.double()
        first, second = scores[0].sort(descending=True).indices[1:3].tolist()
        if bias is not None:  # the first token is tied by the bias alone
            bias[second] += (scores[0, first] - scores[0, second]).float()
    runs = LocalEffects(model, modular_routers(model), [], 0, 1.0, 1)
    watched(model, runs, ids)
    certified = certified_by_router(x.cpu(), router.weight.cpu(), bias, 2)
    assert runs.uncertified[name].mean().value == (~certified).double().mean()
    assert bool(certified[0]) is (bias is None)
    assert runs.uncertified_status == {}


def test_no_choice_is_certified_where_a_selection_bias_or_groups_add_roundings():
    model, ids = lively(tiny_model("deepseek_v3")), batch(2, 10)
    runs = LocalEffects(model, modular_routers(model), [], 0, 1.0, 1)
    watched(model, runs, ids)
    assert set(runs.uncertified_status) == set(modular_routers(model))
    assert all("roundings" in reason for reason in runs.uncertified_status.values())
