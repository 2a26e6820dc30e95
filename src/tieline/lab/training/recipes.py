"""Recipes: named functions that return whole frozen configurations.

Language (paper 1, Tables 1, 4, 5, 7 and 8); GATE is one of the ten of `config.VARIANTS`:

    demo-smoke-GATE       1 layer, D = 32, 20 steps on the text in the box: seconds, no download
    demo-small-GATE       2 layers, D = 32, 16 experts, 320 steps on it: until the budget is met
    demo-small-GATE-kK    the same with K experts: smoe and smooth50, 4 and 5
    enwik8-small-GATE     2 layers, D = 96, bytes: minutes on one core; also text8-small (letters)
                          and wikitext-small (BPE of 512 tokens, with the AAA attack)
    enwik8-long-GATE      three times as many steps at a lower rate; also text8-long, wikitext-long
    enwik8-extended-GATE  eight times as many, scored on 131,072 bytes of each split
    enwik8-10m-GATE       4 layers, D = 192, 10 M parameters, bytes: a quarter of an hour
    enwik8-paper-GATE     8 layers, D = 352, span 2048, 80 epochs: accelerators; also text8-paper
    wikitext-paper-GATE   6 layers, D = 352, span 1024, 80 epochs: accelerators, training split
    wikitext-paper-GATE-kK   the same with K experts: smoe 4 and 5, smooth50 4

Attention (paper 4): softmax or sigmoid, the same data and the same start from the same seed:

    demo-attention-KIND     demo-small-smoe with either attention: seconds
    enwik8-attention-KIND   2 layers, D = 96, windows of 256 bytes: minutes on one core

Images: CIFAR-10 (paper 1, Figures 1 and 3) and PACS (papers 1 and 2, Table 3):

    cifar10-small-GATE        the paper's layers (3072 wide, 32 experts of 128, top 4), one pass
                              over 12,800 images: minutes on one core
    cifar10-paper-GATE        the same, 50 passes over all images
    pacs-small-GATE-DOMAIN    a small transformer at 32×32, 2 of 6 experts, DOMAIN left out
    pacs-paper-GATE-DOMAIN    pretrained ViT-S/16, its last two networks turned into 6 experts

with GATE smoe, smooth50 or smooth1 for CIFAR-10, and for PACS

    linear       linear router, top 2
    cosine       cosine router with a projection and temperature 1/2: GMoE's
    perturbed    the same with τ1 = τ2 = 0.1 (paper 2)
    smooth       cosine router, smooth top-2 with b = 50: SmoothGMoE (paper 1)
    soft         Soft MoE: ⌈2T/6⌉ slots per expert that mix the T patches of one image
    expert-choice   cosine router, each expert takes its ⌈2T/6⌉ best patches of the whole batch

The last two do the work of two experts per patch, like the others; paper 1 gives no sizes for them.

Sentences: GLUE with one upcycled network (paper 1, Table 2):

    glue-smoke-TASK-GATE        2 layers of width 32 at random weights: tests that everything runs
    glue-paper-TASK-GATE-kK     BERT-large, 16 experts in one block, 10 epochs: accelerators

TASK is cola, mrpc or rte; GATE smoe, remoe or smooth50; K 2 or 4. The smoke run starts from random
weights and learns to give one constant answer: its scores mean nothing. The baseline `smoe` is
GShard's top-k with the paper's gate noise of 1.0 and capacity factor of 1.5 (C.3.2): an expert has
at most ⌈1.5 kT/E⌉ of the T tokens of a batch, padding included, and scores are noisy in training.
ReMoE and smooth top-k have no fixed number of experts per token and run without a capacity, which
the paper does not define for them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import product
from typing import Any, ClassVar

from tieline.core.errors import require
from tieline.core.records import Result
from tieline.core.setting_fields import require_setting
from tieline.lab.command_settings import TrainSettings
from tieline.lab.training.config import (
    GATE_NAMES,
    DataConfig,
    DecoderConfig,
    GateConfig,
    LossConfig,
    MixtureConfig,
    OptimConfig,
    PatchConfig,
    SentenceConfig,
    TrainConfig,
    VisionTransformerConfig,
    gate_config,
)

ATTENTION_KINDS = ("softmax", "sigmoid")
VOCABULARY = {"enwik8": 256, "text8": 27, "wikitext": 512}


def text_small(data: str, gate: str) -> TrainConfig:
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


def text_long(data: str, gate: str) -> TrainConfig:
    """The small form, long enough for seeds to agree: 1,500 steps at two thirds of the rate.

    After 500 steps at 3e-3, and after 1,000, runs leave the first plateau at times that differ by
    seed, and one gate may seem 8 % better than another.
    """
    small = text_small(data, gate)
    return small.replace(recipe=f"{data}-long-{gate}", optim__steps=1500, optim__rate=2e-3)


def enwik8_extended(gate: str) -> TrainConfig:
    """The long form, long enough to resolve 1 % differences with six seeds: 4.1 M bytes of enwik8.

    Eight times the steps of the small form and eight times its windows to score on; only enwik8
    is long enough that no text is seen twice.
    """
    long = text_long("enwik8", gate)
    return long.replace(recipe=f"enwik8-extended-{gate}", optim__steps=4000, evaluate_items=1024)


def demo_smoke(gate: str) -> TrainConfig:
    """One layer of width 32 on the text in the box, 20 steps: tests that everything runs."""
    return TrainConfig(
        recipe=f"demo-smoke-{gate}",
        task="language",
        model=DecoderConfig(
            layers=1, d_model=32, d_hidden=16, heads=2, vocabulary=256, context=32, n_experts=8
        ),
        gate=gate_config(gate),
        data=DataConfig(name="demo"),
        optim=OptimConfig(steps=20, batch=8, rate=5e-3, warmup=4),
        log_every=5,
        checkpoint_every=10,
        evaluate_items=16,
    )


def demo_small(gate: str, k: int = 2) -> TrainConfig:
    """Two layers of width 32, 16 experts, on the text in the box: 320 steps of 512 bytes.

    Two changes compensate for the few steps. Scores start as wide as those of wider models, so that
    ε begins below its budget; and θ, which Adam moves by about its rate a step, has a higher rate,
    so that it reaches the budget and, annealed, zero.
    """
    return TrainConfig(
        recipe=f"demo-small-{gate}" + (f"-k{k}" if k != 2 else ""),
        task="language",
        model=DecoderConfig(
            layers=2, d_model=32, d_hidden=16, heads=2, vocabulary=256, context=32, initial_std=0.15
        ),
        gate=gate_config(gate, k),
        data=DataConfig(name="demo"),
        optim=OptimConfig(steps=320, batch=16, rate=3e-3, warmup=20, epsilon_rate=0.1),
        log_every=20,
        checkpoint_every=1_000,
        evaluate_items=64,
    )


def demo_attention(kind: str) -> TrainConfig:
    """Two layers, softmax or sigmoid attention (paper 4)."""
    base = demo_small("smoe")
    return base.replace(recipe=f"demo-attention-{kind}", model__attention=kind)


def enwik8_attention(kind: str) -> TrainConfig:
    """Two layers, windows of 256 bytes of enwik8, softmax or sigmoid attention (paper 4)."""
    base = text_small("enwik8", "smoe")
    return base.replace(
        recipe=f"enwik8-attention-{kind}",
        model__attention=kind,
        model__context=256,
        optim__steps=1000,
        optim__rate=2e-3,
    )


PAPER2_GATES = ("smoe", "cosine", "perturbed")


def paper2_small(data: str, gate: str) -> TrainConfig:
    """Paper 2, E.2, the small setup: 6 layers, 15 M parameters, 16 experts, top 2, 60,000 steps."""
    return TrainConfig(
        recipe=f"{data}-paper2-small-{gate}",
        task="language",
        model=DecoderConfig(
            layers=6, d_model=216, d_hidden=224, heads=6, vocabulary=VOCABULARY[data], context=512
        ),
        gate=gate_config(gate),
        data=DataConfig(name=data),
        optim=OptimConfig(steps=60_000, batch=48, rate=7e-4, warmup=4000, betas=(0.9, 0.999)),
        checkpoint_every=1000,
        evaluate_items=4096,
        note="layers, parameters, experts, d_e = 8, Adam and steps are the paper's; it gives no "
        "width, heads, span, batch or rate: these are ours, so that parameters are 15 M",
    )


def paper2_demo(gate: str) -> TrainConfig:
    """Six layers as in paper 2, width 32, 320 steps."""
    small = demo_small(gate)
    return small.replace(recipe=f"demo-paper2-{gate}", model__layers=6)


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


def byte_text_paper(data: str, gate: str) -> TrainConfig:
    """Paper 1, Table 7: 8 layers, width 352, span 2048, batch 48, 80 epochs of 90 M bytes."""
    return TrainConfig(
        recipe=f"{data}-paper-{gate}",
        task="language",
        model=DecoderConfig(
            layers=8, d_model=352, d_hidden=352, heads=8, vocabulary=VOCABULARY[data], context=2048
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


CIFAR10_GATES = ("smoe", "smooth50", "smooth1")
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PATCH_COSINE = {"d_proj": 32, "temperature": 0.5}
DOMAIN_VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"router": "cosine", "router_options": PATCH_COSINE},
    "perturbed": {"router": "cosine", "router_options": {**PATCH_COSINE, "tau": (0.1, 0.1)}},
    "smooth": {
        "router": "cosine",
        "router_options": PATCH_COSINE,
        "gate": "smooth",
        "gate_options": {"b": 50.0},
    },
    "soft": {"gate": "soft_moe"},
    "smear": {"gate": "smear"},
    "expert-choice": {"router": "cosine", "router_options": PATCH_COSINE, "gate": "expert_choice"},
}
DOMAIN_GATES = tuple(DOMAIN_VARIANTS)


def cifar10_small(gate: str) -> TrainConfig:
    """Four layers at the paper's sizes, 100 M parameters, one pass over 12,800 images."""
    return TrainConfig(
        recipe=f"cifar10-small-{gate}",
        task="images",
        model=MixtureConfig(),
        gate=gate_config(gate, k=4),
        data=DataConfig(name="cifar10", options={"images": 12_800, "scored": 2_000}),
        optim=OptimConfig(steps=100, batch=128, rate=3e-4, warmup=15),
        losses=LossConfig(boundary=1.0),
        log_every=20,
        checkpoint_every=1_000,
        note="12,800 of 50,000 images, one pass; scored on 2,000 of 10,000 test images",
    )


def cifar10_paper(gate: str) -> TrainConfig:
    """The same layers on all images; the paper gives their sizes, but not how they were trained."""
    return cifar10_small(gate).replace(
        recipe=f"cifar10-paper-{gate}",
        data=DataConfig(name="cifar10"),
        optim__steps=50 * 50_000 // 128,
        optim__warmup=400,
        log_every=50,
        checkpoint_every=2_000,
        note="sizes of paper 1, B.3; it states no optimiser, so this one is ours",
    )


def domain_gate(name: str, shape: PatchConfig | VisionTransformerConfig, k: int = 2) -> GateConfig:
    """Return a routing variant of patches; "soft" gets slots for the work of top-k experts."""
    require(name in DOMAIN_VARIANTS, f"the gate {name!r} is not one of {list(DOMAIN_GATES)}")
    gate = GateConfig(name=name, k=k, **DOMAIN_VARIANTS[name])
    if name != "soft":
        return gate
    from tieline.routing.gates import (
        expert_capacity,
    )  # loads torch, which the list of recipes does not need

    slots = expert_capacity(shape.tokens, shape.n_experts, k)
    return replace(gate, gate_options={"slots": slots})


def pacs_small(gate: str, out: str) -> TrainConfig:
    """A small transformer on PACS, a domain left out."""
    require(out in DOMAINS, f"the domain {out!r} is not one of {list(DOMAINS)}")
    return TrainConfig(
        recipe=f"pacs-small-{gate}-{out}",
        task="domains",
        model=PatchConfig(),
        gate=domain_gate(gate, PatchConfig()),
        data=DataConfig(name="pacs", options={"out": out}),
        optim=OptimConfig(steps=240, batch=32, rate=2e-3, warmup=20),
        losses=LossConfig(boundary=1.0),
        checkpoint_every=1_000,
        note="32×32 pixels, no pretrained backbone, the model of the last step",
    )


def pacs_selected(gate: str, out: str) -> TrainConfig:
    """The same, and the model of the best step on held-out images of the training domains."""
    return pacs_small(gate, out).replace(
        recipe=f"pacs-selected-{gate}-{out}",
        select_every=40,
        note="32×32 pixels, no pretrained backbone, training-domain model selection",
    )


def pacs_paper(gate: str, out: str) -> TrainConfig:
    """ViT-S/16 with 6 experts in its last two blocks on PACS at 224×224, a domain left out."""
    return TrainConfig(
        recipe=f"pacs-paper-{gate}-{out}",
        task="domains",
        model=VisionTransformerConfig(),
        gate=domain_gate(gate, VisionTransformerConfig()),
        data=DataConfig(name="pacs", options={"out": out, "file": "pacs224.npz"}),
        optim=OptimConfig(steps=5_000, batch=96, rate=3e-5, weight_decay=0.0, warmup=100),
        losses=LossConfig(boundary=1.0),
        select_every=300,
        note="paper 1, C.2: 5,000 steps of 32 images a domain (paper 2: 15,000); both keep the "
        "best model on held-out images of the training domains, here every 300 steps",
    )


GLUE_TASKS = {"cola": ("CoLA", 8_551), "mrpc": ("MRPC", 3_668), "rte": ("RTE", 2_490)}
GLUE_GATES = ("smoe", "remoe", "smooth50")
GSHARD_OPTIONS = {"noise": 1.0, "capacity_factor": 1.5}
"""Options of the GShard gate in paper 1, C.3.2."""


def glue_gate(name: str, k: int = 2) -> GateConfig:
    """Return a routing variant; the baseline "smoe" has the paper's noise and capacity."""
    plain = gate_config(name, k)
    if name != "smoe":
        return plain
    return replace(plain, gate="gshard", gate_options=dict(GSHARD_OPTIONS))


def glue_smoke(task: str, gate: str) -> TrainConfig:
    """A tiny BERT, 16 experts in one block, 20 steps."""
    return TrainConfig(
        recipe=f"glue-smoke-{task}-{gate}",
        task="sentences",
        model=SentenceConfig(
            layers=2, d_model=32, d_hidden=64, heads=2, vocabulary=512, context=64, routed=1
        ),
        gate=glue_gate(gate),
        data=DataConfig(name="glue", options={"task": GLUE_TASKS[task][0]}),
        optim=OptimConfig(steps=20, batch=16, rate=1e-3, warmup=5),
        log_every=5,
        checkpoint_every=1_000,
        note="a smoke run: random weights, so the scores are those of guessing",
    )


def glue_paper(task: str, gate: str, k: int) -> TrainConfig:
    """BERT-large with 16 experts in one block, ten epochs (paper 1, C.3)."""
    name, examples = GLUE_TASKS[task]
    return TrainConfig(
        recipe=f"glue-paper-{task}-{gate}-k{k}",
        task="sentences",
        model=SentenceConfig(
            layers=24,
            d_model=1024,
            d_hidden=4096,
            heads=16,
            vocabulary=30_522,
            context=128,
            routed=23,
            pretrained="google-bert/bert-large-uncased",
        ),
        gate=glue_gate(gate, k),
        data=DataConfig(name="glue", options={"task": name}),
        optim=OptimConfig(steps=10 * examples // 32, batch=32, rate=3e-5, weight_decay=0.0),
        note="the paper also tries rates of 2e-5 and 5e-5 and stops early, and does not say which "
        "block is replaced: here the last",
    )


Recipe = Callable[[], TrainConfig]


def _recipe_family(
    pattern: str, make: Callable[..., TrainConfig], *choices: Iterable[Any]
) -> dict[str, Recipe]:
    """Return recipes `make(*choice)` for all combinations of choices, named by `pattern`."""
    return {pattern.format(*choice): partial(make, *choice) for choice in product(*choices)}


RECIPES: dict[str, Recipe] = {
    **_recipe_family("demo-smoke-{}", demo_smoke, GATE_NAMES),
    **_recipe_family("demo-small-{}", demo_small, GATE_NAMES),
    **_recipe_family("demo-small-{}-k{}", demo_small, ("smoe", "smooth50"), (4, 5)),
    **_recipe_family("{}-small-{}", text_small, VOCABULARY, GATE_NAMES),
    **_recipe_family("{}-long-{}", text_long, VOCABULARY, GATE_NAMES),
    **_recipe_family("enwik8-extended-{}", enwik8_extended, GATE_NAMES),
    **_recipe_family("demo-attention-{}", demo_attention, ATTENTION_KINDS),
    **_recipe_family("enwik8-attention-{}", enwik8_attention, ATTENTION_KINDS),
    **_recipe_family("enwik8-10m-{}", enwik8_10m, GATE_NAMES),
    **_recipe_family("demo-paper2-{}", paper2_demo, PAPER2_GATES),
    **_recipe_family("{}-paper2-small-{}", paper2_small, ("enwik8", "text8"), PAPER2_GATES),
    **_recipe_family("{}-paper-{}", byte_text_paper, ("enwik8", "text8"), GATE_NAMES),
    **_recipe_family("wikitext-paper-{}", wikitext_paper, GATE_NAMES),
    **_recipe_family("wikitext-paper-{}-k{}", wikitext_paper, ("smoe",), (4, 5)),
    **_recipe_family("wikitext-paper-{}-k{}", wikitext_paper, ("smooth50",), (4,)),
    **_recipe_family("cifar10-small-{}", cifar10_small, CIFAR10_GATES),
    **_recipe_family("cifar10-paper-{}", cifar10_paper, CIFAR10_GATES),
    **_recipe_family("pacs-small-{}-{}", pacs_small, DOMAIN_GATES, DOMAINS),
    **_recipe_family("pacs-selected-{}-{}", pacs_selected, DOMAIN_GATES, DOMAINS),
    **_recipe_family("pacs-paper-{}-{}", pacs_paper, DOMAIN_GATES, DOMAINS),
    **_recipe_family("glue-smoke-{}-{}", glue_smoke, GLUE_TASKS, GLUE_GATES),
    **_recipe_family("glue-paper-{}-{}-k{}", glue_paper, GLUE_TASKS, GLUE_GATES, (2, 4)),
}
"""Function that returns the configuration of each recipe, by name."""


def recipe_config(name: str, seed: int = 0) -> TrainConfig:
    """Return the configuration of a recipe with a seed."""
    close = get_close_matches(name, RECIPES, n=4)
    hint = f"did you mean {', '.join(close)}?" if close else "`tieline train --list` shows all"
    require(name in RECIPES, f"no recipe {name!r}; {hint}")
    return RECIPES[name]().replace(seed=seed)


def with_cooling(recipe: str | TrainConfig, settings: TrainSettings) -> TrainConfig:
    """Return a configuration with the schedule of the temperature that the settings ask for.

    Args:
        recipe: name of a recipe, which takes the seed of the settings, or a configuration.
        settings: the settings of `train`.
    """
    config = recipe_config(recipe, settings.seed) if isinstance(recipe, str) else recipe
    changes, cooling = settings.cooling, config.gate.cooling
    if not changes:
        return config
    require_setting(
        cooling is not None,
        "{schedule}, {tau_start}, {tau_end} and {halvings} are for gates with a temperature, "
        "recipes …-cooled; {recipe} has none",
        recipe=config.recipe,
    )
    assert cooling is not None
    cooling = replace(cooling, **changes)
    require_setting(
        settings.tau_end is None or cooling.schedule in ("linear", "cosine"),
        "{tau_end} is for linear and cosine schedules, not {kind}",
        kind=cooling.schedule,
    )
    require_setting(
        settings.halvings is None or cooling.schedule == "boundary",
        "{halvings} is for the boundary schedule, not {kind}",
        kind=cooling.schedule,
    )
    return config.replace(gate__cooling=cooling)


@dataclass(frozen=True, repr=False)
class RecipeList(Result):
    """Names of the recipes, with the description of each.

    Attributes:
        recipes: description of each recipe.
        in_full: whether a terminal shows every recipe rather than groups of them.
    """

    format: ClassVar[str] = "tieline-recipes"

    recipes: dict[str, str]
    in_full: bool = field(default=True, metadata={"json": False})


def recipe_list(in_full: bool = True) -> RecipeList:
    """Return all recipes with the docstrings of their functions.

    Args:
        in_full: whether a terminal shows every recipe rather than groups of them.
    """
    functions = {name: getattr(make, "func", make) for name, make in RECIPES.items()}
    texts = {name: (make.__doc__ or "").strip() for name, make in functions.items()}
    return RecipeList(texts, in_full)
