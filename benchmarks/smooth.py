"""What smooth routing costs in time: a forward pass of a model before and after `smooth_`.

    python benchmarks/smooth.py [--rounds 30] [--budget 2.5] [--k-max 4] [--folder MODEL]
    python benchmarks/smooth.py --only tieline --budget 2.3 --target 1.15

Both models take turns within one process; a ratio is smoothed over original under the same
implementation of the experts, with a 95 % interval from resampling rounds; the last rows have the
original as transformers runs it by default and the smoothed model by our kernel. `top-k+1` is the
original with one expert more for every token, the plain way to spend the same kind of budget.
"""

import argparse
import copy
from typing import Any

import torch

from harness import Ratio, interleave, ratio, report
from tieline.models import find_routers, smooth_
from tieline.models.demo import demo_text
from tieline.models.model import Model
from tieline.run.calibration import calibrate
from tieline.run.corpus import tokenise

IMPLEMENTATIONS = ("tieline", "grouped_mm", "eager")
DEFAULT = "grouped_mm"  # of transformers
TARGET = 1.3
LENGTH, ROWS = 512, 8


def contestants(
    model: Any, ids: torch.Tensor, budget: float | None, k_max: int | None
) -> dict[str, Any]:
    smoothed, wider = copy.deepcopy(model), copy.deepcopy(model)
    smooth_(smoothed, budget=budget, calibration=calibrate(smoothed, [ids]), k_max=k_max)
    for router in find_routers(wider).values():
        untyped: Any = router
        untyped.top_k += 1
    return {"original": model, "smoothed": smoothed, "top-k+1": wider}


def runner(model: Any, ids: torch.Tensor) -> Any:
    def run() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)

    return run


def measured(
    models: dict[str, Any], ids: torch.Tensor, name: str, options: argparse.Namespace
) -> list[Ratio]:
    for model in models.values():
        model.set_experts_implementation(name)
    samples = interleave({key: runner(model, ids) for key, model in models.items()}, options.rounds)
    original = samples["original"]
    tokens = f"{ids.numel()} tokens"
    return [
        ratio(f"{name}, {tokens}: smoothed", samples["smoothed"], original, options.target),
        ratio(f"{name}, {tokens}: smoothed", samples["smoothed"], original, None, "wall"),
        ratio(f"{name}, {tokens}: top-k+1", samples["top-k+1"], original),
    ]


def by_our_kernel(models: dict[str, Any], ids: torch.Tensor, rounds: int) -> list[Ratio]:
    """What a user gains or loses who smooths a model and takes our experts for it."""
    for name, implementation in (("original", DEFAULT), ("smoothed", "tieline")):
        models[name].set_experts_implementation(implementation)
    runs = {name: runner(models[name], ids) for name in ("original", "smoothed")}
    samples = interleave(runs, rounds)
    name = f"{ids.numel()} tokens: smoothed, tieline / original, {DEFAULT}"
    pair = samples["smoothed"], samples["original"]
    return [ratio(name, *pair, TARGET), ratio(name, *pair, None, "wall")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", type=float, default=None)
    parser.add_argument("--k-max", type=int, default=None)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--only", default=None, help="one implementation of the experts")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    loaded = Model.open(options.folder, dtype="fp32")
    text = tokenise(loaded.tokenizer, demo_text(), LENGTH * options.rows, LENGTH)
    ids = torch.stack(text.sequences)
    models = contestants(loaded.module, ids, options.budget, options.k_max)
    names = [options.only] if options.only else IMPLEMENTATIONS
    ratios = [row for name in names for row in measured(models, ids, name, options)]
    if options.only is None:
        ratios += by_our_kernel(models, ids, options.rounds)
    report("Forward pass, smoothed over original", ratios, options.json, model=loaded.name)


if __name__ == "__main__":
    main()
