"""Trains the small Mixture-of-Experts language model that ships with Tieline.

    OMP_NUM_THREADS=1 python -m tools.shipped_model --work /tmp/shipped

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

from .corpus import held_out_text, training_documents
from .recipe import END, Recipe, build_model, train_tokenizer
from .training import train, validate

SHIPPED = Path(__file__).parents[2] / "src" / "tieline" / "shipped"


def main() -> None:
    """Assemble the text, train, write."""
    work, out, recipe = _options()
    work.mkdir(parents=True, exist_ok=True)
    documents, text = training_documents(), held_out_text()
    tokenizer = train_tokenizer(documents, recipe.vocabulary)
    stream = torch.tensor(tokenizer(END.join(documents), verbose=False)["input_ids"])
    held_out = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    model = build_model(recipe)
    state = train(model, stream, held_out, recipe, work / "checkpoint.safetensors")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "text.txt").write_text(text, encoding="utf-8", newline="\n")
    seen = recipe.steps * recipe.batch * recipe.context
    tokens = {"training": len(stream), "held_out": len(held_out), "seen": seen}
    digests = {"training": _digest("\0".join(documents)), "held_out": _digest(text)}
    log = _provenance(recipe) | {"tokens": tokens, "sha256": digests} | _outcome(state)
    log["window_losses"] = validate(model, held_out, recipe)[0].tolist()
    (out / "training.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


def _options() -> tuple[Path, Path, Recipe]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder of the finished model")
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
    command = "OMP_NUM_THREADS=1 python -m tools.shipped_model"
    return {"command": command, "recipe": asdict(recipe), "versions": versions}


def _outcome(state: dict[str, Any]) -> dict[str, Any]:
    """Loss curve, wall time, choices per (layer, expert) and their entropy over log experts."""
    load = torch.tensor(state["load"], dtype=torch.float64)
    share = load / load.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(share).sum(dim=-1) / math.log(load.shape[-1])
    return {
        "seconds": round(state["seconds"], 1),
        "curve": state["curve"],
        "validation_load": state["load"],
        "load_entropy": entropy.tolist(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
