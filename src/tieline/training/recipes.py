"""Recipes: named functions that return whole frozen configurations.

    enwik8-small-GATE     2 layers, D = 96, bytes: minutes on one core
    enwik8-10m-GATE       4 layers, D = 192, 10 M parameters, bytes: a quarter of an hour
    enwik8-paper-GATE     8 layers, D = 352, span 2048, 80 epochs (paper 1, Table 7): accelerators
    enwik8-long-GATE      three times as many steps at a lower rate; also text8-long, wikitext-long
    enwik8-extended-GATE  eight times as many, scored on 131,072 bytes of each split
    text8-small-GATE      as enwik8-small on letters
    wikitext-small-GATE   as enwik8-small on a BPE of 512 tokens, with the AAA attack
    shipped-smoke-GATE    1 layer, D = 32, 20 steps on the text in the box: seconds, no download
    shipped-small-GATE    2 layers, D = 32, 16 experts, 320 steps on it: until the budget is met
    text8-paper-GATE      as enwik8-paper on letters
    wikitext-paper-GATE   6 layers, D = 352, span 1024, 80 epochs: accelerators, training split
    wikitext-paper-GATE-kK   the same with K experts: smoe 4 and 5, smooth50 4 (paper 1, Table 8)

GATE is one of the nine of `gates`.
"""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

from tieline.errors import require
from tieline.training.config import (
    DataConfig,
    DecoderConfig,
    OptimConfig,
    TrainConfig,
)
from tieline.training.gates import GATE_NAMES, gate_config

__all__ = [
    "RECIPES",
    "enwik8_10m",
    "enwik8_paper",
    "extended_form",
    "long_form",
    "recipe_config",
    "register_recipe",
    "shipped_small",
    "small_form",
    "smoke",
    "wikitext_paper",
]

Recipe = Callable[[], TrainConfig]

RECIPES: dict[str, Recipe] = {}
"""Recipes by name."""

VOCABULARY = {"enwik8": 256, "text8": 27, "wikitext": 512}


def register_recipe(name: str, recipe: Recipe) -> Recipe:
    """Make a recipe known; refuses a name that is taken."""
    require(name not in RECIPES, f"the recipe {name!r} is registered already")
    RECIPES[name] = recipe
    return recipe


def recipe_config(name: str, seed: int = 0) -> TrainConfig:
    """The configuration of a recipe with a seed."""
    close = get_close_matches(name, RECIPES, n=4)
    hint = f"did you mean {', '.join(close)}?" if close else "`tieline train --list` shows all"
    require(name in RECIPES, f"no recipe {name!r}; {hint}")
    return RECIPES[name]().replace(seed=seed)


def small_form(data: str, gate: str) -> TrainConfig:
    """Two layers of width 96 on a text: 500 steps of 1,024 tokens."""
    return TrainConfig(
        recipe=f"{data}-small-{gate}",
        task="language",
        model=DecoderConfig(
            layers=2, d_model=96, d_hidden=64, heads=4, vocabulary=VOCABULARY[data], context=128
        ),
        gate=gate_config(gate),
        data=DataConfig(name=data),
        optim=OptimConfig(steps=500, batch=8, rate=3e-3),
        evaluate_items=128,
    )


def long_form(data: str, gate: str) -> TrainConfig:
    """The small form until seeds agree: 1,500 steps of 1,024 tokens at two thirds of the rate.

    After 500 steps at 3e-3, and after 1,000, runs leave the first plateau at times that differ by
    seed, and one gate seems 8 % better than another.
    """
    small = small_form(data, gate)
    return small.replace(recipe=f"{data}-long-{gate}", optim__steps=1500, optim__rate=2e-3)


def extended_form(gate: str) -> TrainConfig:
    """The long form until six seeds tell gates apart by a percent: 4.1 M bytes of enwik8.

    Eight times the steps of the small form and eight times its windows to score on; of the texts
    only enwik8 is long enough to see nothing twice.
    """
    long = long_form("enwik8", gate)
    return long.replace(recipe=f"enwik8-extended-{gate}", optim__steps=4000, evaluate_items=1024)


def smoke(gate: str) -> TrainConfig:
    """One layer of width 32 on the text in the box, 20 steps: whether everything runs."""
    return TrainConfig(
        recipe=f"shipped-smoke-{gate}",
        task="language",
        model=DecoderConfig(
            layers=1, d_model=32, d_hidden=16, heads=2, vocabulary=256, context=32, n_experts=8
        ),
        gate=gate_config(gate),
        data=DataConfig(name="shipped"),
        optim=OptimConfig(steps=20, batch=8, rate=5e-3, warmup=4),
        log_every=5,
        checkpoint_every=10,
        evaluate_items=16,
    )


def shipped_small(gate: str) -> TrainConfig:
    """Two layers of width 32, 16 experts, on the text in the box: 320 steps of 512 bytes.

    Two things make up for the few steps. Scores start as wide as those of wider models, so that ε
    begins below its budget; and θ, which Adam moves by about its rate a step, has a higher rate, so
    that it gets to the budget and, annealed, on to nothing.
    """
    return TrainConfig(
        recipe=f"shipped-small-{gate}",
        task="language",
        model=DecoderConfig(
            layers=2, d_model=32, d_hidden=16, heads=2, vocabulary=256, context=32, initial_std=0.15
        ),
        gate=gate_config(gate),
        data=DataConfig(name="shipped"),
        optim=OptimConfig(steps=320, batch=16, rate=3e-3, warmup=20, epsilon_rate=0.1),
        log_every=20,
        checkpoint_every=1_000,
        evaluate_items=64,
    )


def enwik8_10m(gate: str) -> TrainConfig:
    """Four layers of width 192, 16 experts of width 256: 10 M parameters, 1 M bytes of enwik8."""
    return TrainConfig(
        recipe=f"enwik8-10m-{gate}",
        task="language",
        model=DecoderConfig(
            layers=4, d_model=192, d_hidden=256, heads=6, vocabulary=256, context=128
        ),
        gate=gate_config(gate),
        data=DataConfig(name="enwik8"),
        optim=OptimConfig(steps=1000, batch=8, rate=2e-3),
    )


def enwik8_paper(gate: str, data: str = "enwik8") -> TrainConfig:
    """Paper 1, Table 7: 8 layers, width 352, span 2048, batch 48, 80 epochs of 90 M bytes."""
    return TrainConfig(
        recipe=f"{data}-paper-{gate}",
        task="language",
        model=DecoderConfig(
            layers=8,
            d_model=352,
            d_hidden=352,
            heads=8,
            vocabulary=VOCABULARY[data],
            context=2048,
        ),
        gate=gate_config(gate),
        data=DataConfig(name=data),
        optim=OptimConfig(steps=80 * 90_000_000 // (48 * 2048), batch=48, rate=7e-4, warmup=4000),
        checkpoint_every=1000,
        evaluate_items=4096,
        note="the paper's form: it used two H100",
    )


def wikitext_paper(gate: str, k: int = 2) -> TrainConfig:
    """Paper 1, Table 7: 6 layers, width 352, span 1024, batch 48, 80 epochs of 103 M tokens."""
    return TrainConfig(
        recipe=f"wikitext-paper-{gate}" + (f"-k{k}" if k != 2 else ""),
        task="language",
        model=DecoderConfig(
            layers=6, d_model=352, d_hidden=352, heads=8, vocabulary=32768, context=1024
        ),
        gate=gate_config(gate, k),
        data=DataConfig(name="wikitext", options={"vocabulary": 32768}),
        optim=OptimConfig(steps=80 * 103_000_000 // (48 * 1024), batch=48, rate=7e-4, warmup=4000),
        checkpoint_every=1000,
        evaluate_items=4096,
        note="the paper's form: it needs wiki.train.tokens and used two H100",
    )


for _gate in GATE_NAMES:
    for _data in VOCABULARY:
        register_recipe(f"{_data}-small-{_gate}", partial(small_form, _data, _gate))
        register_recipe(f"{_data}-long-{_gate}", partial(long_form, _data, _gate))
    register_recipe(f"shipped-smoke-{_gate}", partial(smoke, _gate))
    register_recipe(f"shipped-small-{_gate}", partial(shipped_small, _gate))
    register_recipe(f"enwik8-extended-{_gate}", partial(extended_form, _gate))
    register_recipe(f"enwik8-10m-{_gate}", partial(enwik8_10m, _gate))
    register_recipe(f"enwik8-paper-{_gate}", partial(enwik8_paper, _gate))
    register_recipe(f"text8-paper-{_gate}", partial(enwik8_paper, _gate, "text8"))
    register_recipe(f"wikitext-paper-{_gate}", partial(wikitext_paper, _gate))
for _gate, _k in (("smoe", 4), ("smoe", 5), ("smooth50", 4)):
    register_recipe(f"wikitext-paper-{_gate}-k{_k}", partial(wikitext_paper, _gate, _k))
