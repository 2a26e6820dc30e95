"""Training soft and deploying hard against top-k from the start, on paired seeds of `demo-small`.

    python benchmarks/soft_to_hard.py train --seeds 0 1 --out runs    one file per arm and seed
    python benchmarks/soft_to_hard.py table --out runs           the tables of docs/limits.md

Arms: `topk` is `demo-small-smoe`; `cold` is the soft gate at τ = 0.01 from the start, the control
for the fixed norm of the router; the others cool from τ = 1. Losses are those of the test split of
the text in the box, nats per byte; every arm but `topk` is scored hard.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from tieline.core.statistics import mean_interval
from tieline.lab.training.config import CoolingConfig, DecoderConfig, TrainConfig
from tieline.lab.training.language_tasks import scored_windows
from tieline.lab.training.recipes import recipe_config
from tieline.lab.training.soft_to_hard import hardening_path, soft_gate, soft_layers
from tieline.lab.training.text_data import load_streams
from tieline.lab.training.training_run import run_training

COOLED = {
    "cold": CoolingConfig(schedule="constant", start=0.01, end=0.01),
    "constant": CoolingConfig(schedule="constant", start=0.3),
    "linear": CoolingConfig(schedule="linear"),
    "cosine": CoolingConfig(schedule="cosine"),
    "boundary": CoolingConfig(schedule="boundary", halvings=6),
}
ARMS = ("topk", *COOLED)
TAUS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
LOOKS = 10


def arm_config(arm: str, seed: int) -> TrainConfig:
    """The run of an arm with a seed."""
    if arm == "topk":
        return recipe_config("demo-small-smoe", seed)
    return recipe_config("demo-small-cooled", seed).replace(gate__cooling=COOLED[arm])


def train_arm(arm: str, seed: int) -> dict:
    """Train one arm; its test loss, its course, and the final model at given temperatures."""
    config = arm_config(arm, seed)
    context = config.shape(DecoderConfig, "language").context
    rows = scored_windows(load_streams(config.data).validation, context, 64)
    course, path = [], []

    def look(model, step: int) -> None:
        layers = soft_layers(model)
        if layers and step % (config.optim.steps // LOOKS) == 0:
            (point,) = hardening_path(model, rows, [soft_gate(layers[0]).temperature])
            course.append({"step": step, **asdict(point)})
            if step == config.optim.steps:
                path.extend(asdict(point) for point in hardening_path(model, rows, TAUS))

    with tempfile.TemporaryDirectory() as folder:
        result = run_training(config, Path(folder) / "run", watch=look)
    loss = result.scores["test"]["loss"]
    return {"arm": arm, "seed": seed, "loss": loss, "course": course, "path": path}


def losses_table(runs: list[dict]) -> str:
    """Test loss of the deployed model by arm, and its paired change against top-k."""
    trained = [arm for arm in ARMS if any(run["arm"] == arm for run in runs)]
    by_arm = {
        arm: {run["seed"]: run["loss"] for run in runs if run["arm"] == arm} for arm in trained
    }
    lines = ["| arm | seeds | test loss | change against top-k, % (95 %) |", "|---|---|---|---|"]
    for arm, losses in by_arm.items():
        changes = [100 * (losses[s] / by_arm["topk"][s] - 1) for s in losses]
        low, high = mean_interval(changes) if arm != "topk" and len(changes) > 1 else (0.0, 0.0)
        change = "" if arm == "topk" else f"{fmean(changes):+.2f} ({low:+.2f} to {high:+.2f})"
        lines.append(f"| {arm} | {len(losses)} | {fmean(losses.values()):.4f} | {change} |")
    return "\n".join(lines)


def points_table(runs: list[dict], arm: str, key: str) -> str:
    """Soft and hard loss, what moves in the layers and its bounds, by τ; means over seeds."""
    lines = [
        "| τ | soft | hard | soft − hard | BM(τ) | moved | chain | C_sh τ | moved ≤ chain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    chosen = [run[key] for run in runs if run["arm"] == arm]
    for points in zip(*chosen, strict=True):
        gaps = [point["gap"]["value"] for point in points]
        low, high = mean_interval(gaps) if len(gaps) > 1 else (gaps[0], gaps[0])
        layers = [layer for point in points for layer in point["layers"]]
        means = {
            name: fmean(layer[name] for layer in layers)
            for name in ("boundary_mass", "moved", "chain", "bound")
        }
        kept = sum(layer["moved"] <= layer["chain"] * (1 + 1e-6) for layer in layers)
        lines.append(
            f"| {fmean(p['tau'] for p in points):.4g} | {fmean(p['soft'] for p in points):.4f} | "
            f"{fmean(p['hard'] for p in points):.4f} | {fmean(gaps):+.4f} ({low:+.4f} to "
            f"{high:+.4f}) | {means['boundary_mass']:.3f} | {means['moved']:.3g} | "
            f"{means['chain']:.3g} | {means['bound']:.3g} | {kept} of {len(layers)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train arms, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("train", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.command == "train":
        for seed in options.seeds:
            for arm in options.arms:
                path = options.out / f"{arm}-{seed}.json"
                if not path.exists():
                    path.write_text(json.dumps(train_arm(arm, seed)))
                    print(path, flush=True)
        return
    runs = [json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))]
    print(losses_table(runs))
    for arm in ("cosine", "boundary"):
        print(f"\n{arm}, along the run\n\n{points_table(runs, arm, 'course')}")
    print(
        f"\ncosine, the final model at other temperatures\n\n{points_table(runs, 'cosine', 'path')}"
    )


if __name__ == "__main__":
    main()
