"""Recipes on sentences: GLUE with one upcycled network (paper 1, Table 2).

    glue-smoke-TASK-GATE        2 layers of width 32 at random weights: whether everything runs
    glue-paper-TASK-GATE-kK     BERT-large, 16 experts in one block, 10 epochs: accelerators

TASK is cola, mrpc or rte; GATE smoe, remoe or smooth50; K 2 or 4. The smoke run starts from random
weights and ends near always saying the same: its scores are no result.

The baseline `smoe` is GShard's top-k, with the gate noise of 1.0 and the capacity factor of 1.5
that the paper sets (C.3.2): an expert takes at most ⌈1.5 kT/E⌉ of the T tokens of a batch, padding
included, and scores are noisy in training. ReMoE and smooth top-k have no fixed number of experts
per token; the paper does not say what a capacity would be there, and they run without.
"""

from dataclasses import replace
from functools import partial

from tieline.training.config import DataConfig, GateConfig, OptimConfig, TrainConfig
from tieline.training.gates import gate_config
from tieline.training.recipes import register_recipe
from tieline.training.sentence_models import SentenceConfig
from tieline.training.task_sentences import SENTENCES

__all__ = ["GLUE_GATES", "GLUE_TASKS", "GSHARD", "glue_gate", "glue_paper", "glue_smoke"]

GLUE_TASKS = {"cola": ("CoLA", 8_551), "mrpc": ("MRPC", 3_668), "rte": ("RTE", 2_490)}
GLUE_GATES = ("smoe", "remoe", "smooth50")
GSHARD = {"noise": 1.0, "capacity_factor": 1.5}
"""Paper 1, C.3.2."""


def glue_gate(name: str, k: int = 2) -> GateConfig:
    """A way to route, by its name; the baseline has the paper's noise and capacity."""
    plain = gate_config(name, k)
    if name != "smoe":
        return plain
    return replace(plain, gate="gshard", gate_options=dict(GSHARD))


def glue_smoke(task: str, gate: str) -> TrainConfig:
    """A tiny BERT at random weights with 16 experts in one block, 20 steps."""
    return TrainConfig(
        recipe=f"glue-smoke-{task}-{gate}",
        task=SENTENCES,
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
        task=SENTENCES,
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


for _task in GLUE_TASKS:
    for _gate in GLUE_GATES:
        register_recipe(f"glue-smoke-{_task}-{_gate}", partial(glue_smoke, _task, _gate))
        for _k in (2, 4):
            recipe = partial(glue_paper, _task, _gate, _k)
            register_recipe(f"glue-paper-{_task}-{_gate}-k{_k}", recipe)
