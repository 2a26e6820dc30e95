"""Recipes on images: CIFAR-10 (paper 1, Figures 1 and 3) and PACS (papers 1 and 2, Table 3).

    cifar10-small-GATE        the paper's layers (3072 wide, 32 experts of 128, top 4), one pass
                              over 12,800 images: minutes on one core
    cifar10-paper-GATE        the same, 50 passes over all images
    pacs-small-GATE-DOMAIN    a small transformer at 32×32, 2 of 6 experts, DOMAIN left out
    pacs-paper-GATE-DOMAIN    pretrained ViT-S/16, its last two networks turned into 6 experts

GATE is smoe, smooth50 or smooth1 for CIFAR-10, and for PACS

    linear       linear router, top 2
    cosine       cosine router with a projection and temperature 1/2: GMoE's
    perturbed    the same with τ1 = τ2 = 0.1 (paper 2)
    smooth       cosine router, smooth top-2 with b = 50: SmoothGMoE (paper 1)
"""

from functools import partial
from typing import Any

from tieline.errors import require
from tieline.training import task_images  # registers the tasks
from tieline.training.config import DataConfig, GateConfig, LossConfig, OptimConfig, TrainConfig
from tieline.training.gates import gate_config
from tieline.training.image_models import MixtureConfig, PatchConfig
from tieline.training.recipes import register_recipe
from tieline.training.vision_transformers import VisionTransformerConfig

__all__ = [
    "CIFAR10_GATES",
    "DOMAINS",
    "DOMAIN_GATES",
    "cifar10_paper",
    "cifar10_small",
    "domain_gate",
    "pacs_paper",
    "pacs_small",
]

CIFAR10_GATES = ("smoe", "smooth50", "smooth1")
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
COSINE = {"d_proj": 32, "temperature": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"router": "cosine", "router_options": COSINE},
    "perturbed": {"router": "cosine", "router_options": {**COSINE, "tau": (0.1, 0.1)}},
    "smooth": {
        "router": "cosine",
        "router_options": COSINE,
        "gate": "smooth",
        "gate_options": {"b": 50.0},
    },
}
DOMAIN_GATES = tuple(VARIANTS)


def cifar10_small(gate: str) -> TrainConfig:
    """Four layers at the paper's sizes, 100 M parameters, one pass over 12,800 images."""
    return TrainConfig(
        recipe=f"cifar10-small-{gate}",
        task=task_images.IMAGES,
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
    """The same layers on all images; the paper tells their sizes, but not how they were trained."""
    return TrainConfig(
        recipe=f"cifar10-paper-{gate}",
        task=task_images.IMAGES,
        model=MixtureConfig(),
        gate=gate_config(gate, k=4),
        data=DataConfig(name="cifar10"),
        optim=OptimConfig(steps=50 * 50_000 // 128, batch=128, rate=3e-4, warmup=400),
        losses=LossConfig(boundary=1.0),
        checkpoint_every=2_000,
        note="sizes of paper 1, B.3; it states no optimiser, so this one is ours",
    )


def domain_gate(name: str, k: int = 2) -> GateConfig:
    """A way to route patches, by its name."""
    require(name in VARIANTS, f"the gate {name!r} is not one of {list(DOMAIN_GATES)}")
    return GateConfig(name=name, k=k, **VARIANTS[name])


def pacs_small(gate: str, out: str) -> TrainConfig:
    """A small transformer on PACS at 32×32 with a domain left out."""
    require(out in DOMAINS, f"the domain {out!r} is not one of {list(DOMAINS)}")
    return TrainConfig(
        recipe=f"pacs-small-{gate}-{out}",
        task=task_images.DOMAINS,
        model=PatchConfig(),
        gate=domain_gate(gate),
        data=DataConfig(name="pacs", options={"out": out}),
        optim=OptimConfig(steps=240, batch=32, rate=2e-3, warmup=20),
        losses=LossConfig(boundary=1.0),
        checkpoint_every=1_000,
        note="32×32 pixels, no pretrained backbone, the model of the last step",
    )


def pacs_paper(gate: str, out: str) -> TrainConfig:
    """ViT-S/16 with 6 experts in its last two blocks on PACS at 224×224, a domain left out."""
    return TrainConfig(
        recipe=f"pacs-paper-{gate}-{out}",
        task=task_images.DOMAINS,
        model=VisionTransformerConfig(),
        gate=domain_gate(gate),
        data=DataConfig(name="pacs", options={"out": out, "file": "pacs224.npz"}),
        optim=OptimConfig(steps=5_000, batch=96, rate=3e-5, weight_decay=0.0, warmup=100),
        losses=LossConfig(boundary=1.0),
        note="paper 1, C.2: 5,000 steps of 32 images a domain (paper 2: 15,000); both keep the "
        "best model on held-out images, here it is the last",
    )


for _gate in CIFAR10_GATES:
    register_recipe(f"cifar10-small-{_gate}", partial(cifar10_small, _gate))
    register_recipe(f"cifar10-paper-{_gate}", partial(cifar10_paper, _gate))
for _gate in DOMAIN_GATES:
    for _out in DOMAINS:
        register_recipe(f"pacs-small-{_gate}-{_out}", partial(pacs_small, _gate, _out))
        register_recipe(f"pacs-paper-{_gate}-{_out}", partial(pacs_paper, _gate, _out))
