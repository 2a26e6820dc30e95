"""`diff` on six models: eager against grouped_mm, and fp32 against emulated bf16.

python -m benchmarks.diff_families [--tokens 4096]

The model in the box is trained; the others are small random models of five families (4 layers, the
first of DeepSeek-V3 dense, 16 experts, 4 of them chosen, width 64) whose router weights are spread
so that scores are of order one.
"""

import argparse
import copy
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.planted import SHOWN
from tieline.analysis.compared_sides import ModelSide
from tieline.analysis.diff import diff_models
from tieline.models import find_routers
from tieline.models.demo import demo_text
from tieline.models.experts import use_experts
from tieline.models.model import Model
from tieline.run.corpus import tokenise

WIDTH, VOCABULARY, LENGTH = 64, 512, 256
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(family):
    """A random model with router scores of order one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SMALL | SHOWN[family]))
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for router in find_routers(model).values():
        torch.nn.init.normal_(router.get_parameter("weight"), 0, WIDTH**-0.5)
    return model


def cases(tokens):
    """Name, model and sequences of each case."""
    loaded = Model.open()
    yield (
        "demo",
        loaded.module,
        tokenise(loaded.tokenizer, demo_text(), tokens, LENGTH).sequences,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (tokens // LENGTH, LENGTH), generator=generator)
    for family in SHOWN:
        yield family, random_model(family), tuple(ids)


def compare(name, what, a, b, sequences):
    """Print one row of the table."""
    started = time.perf_counter()
    comparison = diff_models(a, b, sequences)
    seconds = time.perf_counter() - started
    causes = [layer.attribution for layer in comparison.layers if layer.attribution]
    m = comparison.metrics
    cells = [
        name,
        what,
        f"{100 * m['flip']:.2f} %",
        f"{100 * m['flip:any']:.2f} %",
        str(sum(layer.flip.count for layer in comparison.layers)),
        str(sum(cause.unexplained for cause in causes)),
        comparison.causes.conclusion if comparison.causes else "not attributed",
        f"{max(cause.noise for cause in causes):.1e}",
        f"{m['kl']:.1e}",
        f"{seconds:.1f} s",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    heads = ["model", "A, B", "worst layer", "tokens", "flips", "unexplained", "conclusion"]
    heads += ["noise", "KL", "time"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for name, model, sequences in cases(tokens):
        other = copy.deepcopy(model)
        use_experts(model, "eager")
        use_experts(other, "grouped_mm")
        compare(name, "eager, grouped_mm", ModelSide(model), ModelSide(other), sequences)
        use_experts(other, "eager")
        compare(name, "fp32, bf16 emulated", ModelSide(model), ModelSide(other, "bf16"), sequences)


if __name__ == "__main__":
    main()
