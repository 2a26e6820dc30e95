"""Trains the small Mixture-of-Experts language model in the box, rounds it and writes it.

    OMP_NUM_THREADS=1 python -m tools.demo_model --work /tmp/demo

Interrupted, the same command continues from the checkpoint in `--work`. The model, its tokenizer,
the held-out text and the log are written to `--out` when the last step is done, and only then.
"""

import argparse
import hashlib
import json
import math
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from .corpus import held_out_text, tokenizer_documents, training_documents
from .recipe import END, Recipe, build_model, train_tokenizer
from .training import train, validate
from .writing import round_weights, write_model

DEMO = Path(__file__).parents[2] / "src" / "tieline" / "demo"


def main() -> None:
    """Assemble the text, train, round to bfloat16, write."""
    work, out, recipe = _options()
    work.mkdir(parents=True, exist_ok=True)
    documents, text = training_documents(), held_out_text()
    tokenizer = train_tokenizer(tokenizer_documents(), recipe.vocabulary)
    stream = torch.tensor(tokenizer(END.join(documents), verbose=False)["input_ids"])
    held_out = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    model = build_model(recipe)
    state = train(model, stream, held_out, recipe, work / "checkpoint.safetensors")
    trained_tokens = recipe.steps * recipe.batch * recipe.context
    tokens = {"training": len(stream), "held_out": len(held_out), "seen": trained_tokens}
    digests = {"training": _digest("\0".join(documents)), "held_out": _digest(text)}
    trained, _ = validate(model, held_out, recipe)
    round_weights(model)
    outcome = _outcome(state, trained, *validate(model, held_out, recipe))
    log = _provenance(recipe) | {"tokens": tokens, "sha256": digests} | outcome
    write_model(model, tokenizer, out)
    (out / "text.txt").write_text(text, encoding="utf-8", newline="\n")
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


def _options() -> tuple[Path, Path, Recipe]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=DEMO, help="folder of the finished model")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    return options.pop("work"), options.pop("out"), Recipe(**options)


def _provenance(recipe: Recipe) -> dict[str, Any]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    command = "OMP_NUM_THREADS=1 python -m tools.demo_model"
    return {"command": command, "recipe": asdict(recipe), "versions": versions}


def _outcome(
    state: dict[str, Any], trained: Tensor, rounded: Tensor, load: Tensor
) -> dict[str, Any]:
    """Time, loss curve, loss before and after rounding, and the use of the experts after it.

    Args:
        state: of the training.
        trained: loss of each held-out window before the weights are rounded.
        rounded: the same after it.
        load: choices per (layer, expert) after it.
    """
    share = load.double() / load.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(share).sum(dim=-1) / math.log(load.shape[-1])
    return {
        "seconds": round(state["seconds"], 1),
        "cpu_seconds": round(state["cpu_seconds"], 1),
        "curve": state["curve"],
        "validation_loss": {"float32": trained.mean().item(), "bfloat16": rounded.mean().item()},
        "validation_load": load.tolist(),
        "load_entropy": entropy.tolist(),
        "window_losses": rounded.tolist(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
