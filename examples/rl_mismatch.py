"""RL train-inference mismatch: the engine that samples and the trainer that learns route otherwise.

python examples/rl_mismatch.py [tokens]

The "engine" here is the model in the box in emulated bf16, which writes the experts it chose as
vLLM and SGLang do; the trainer is the same model in float32. Three engines are compared with the
trainer: a sound one, one that writes each token's experts one position too late, and one that
numbers the experts of a layer otherwise.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from tieline import Model, diff
from tieline.analysis.compared_sides import ModelSide
from tieline.analysis.diff import diff_models
from tieline.models.demo import demo_text
from tieline.run.corpus import tokenise
from tieline.trace import import_trace

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("tokens", type=int, nargs="?", default=8192, help="of the text in the box")
tokens = parser.parse_args().tokens
loaded = Model.open()
rollout = tokenise(loaded.tokenizer, demo_text(), tokens, 256).sequences
comparison = diff_models(
    ModelSide(loaded.module), ModelSide(copy.deepcopy(loaded.module), "bf16"), rollout
)
assert comparison.traces is not None
trainer, engine = comparison.traces

# 1. Both sides have scores: how many tokens flip, are they near-ties, how far are predictions?
print(comparison.verdict)
logits = comparison.logits
assert logits is not None  # both models predict tokens
print(f"k3 {logits.k3:.2e}, KL {logits.kl:.2e} nats per token; in tokens that flip", end=" ")
print(f"{logits.kl_flipped or 0:.2e}, in the others {logits.kl_unflipped or 0:.2e}")

# 2. The engine gives ids only: alignment still finds what is wrong with them.
array = np.stack([layer.experts[:, : layer.facts.k].numpy() for layer in engine.layers], axis=1)
late = np.roll(array, 1, axis=0)
renumbered = array.copy()
renumbered[:, 2] = torch.randperm(16, generator=torch.Generator().manual_seed(0)).numpy()[
    array[:, 2]
]
keys = {name: getattr(engine, name).numpy() for name in ("tokens", "documents", "positions")}
for name, ids in (("sound", array), ("late", late), ("renumbered", renumbered)):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine.safetensors"
        save_file({"routed_experts": np.ascontiguousarray(ids), **keys}, file)
        result = diff(trainer, import_trace(file, n_experts=16))
    notes = [note for note in result.alignment.notes if "only" not in note]
    print(f"{name:11s} {100 * result.metrics['flip']:.1f} % flips in the worst layer; {notes}")
