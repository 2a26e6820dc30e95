"""The input space of a trained router: switches between tokens, saturation, and a picture.

python examples/input_space.py FOLDER writes slice.png and slice.html there.
"""

import argparse
from pathlib import Path

import torch

from tieline import capture
from tieline.analysis.inspect import linear_weights
from tieline.lab.report.slices import slice_figure, slice_page
from tieline.lab.tropical import centring_of_layer, crossings, slice_layer, token_pairs
from tieline.models.demo import demo_text, load_demo_model, load_demo_tokenizer

TOKENS, PAIRS = 4096, 2000


def main(folder: Path) -> None:
    """Measure the four routers of the model in the box, and draw a plane of the third."""
    model = load_demo_model()
    ids = load_demo_tokenizer()(demo_text())["input_ids"][:TOKENS]
    with torch.no_grad(), capture(model, keep="inputs") as recorder:
        model(torch.tensor(ids).reshape(-1, 256))
    trace = recorder.trace()
    weights = linear_weights(model, trace)
    for layer in trace.layers:
        weight = weights[layer.name]
        print(layer.name)
        for kind in ("neighbours", "any"):
            passed = crossings(layer, weight, token_pairs(trace, PAIRS, kind))
            print(
                f"  {kind:10}  {passed.switches.value:.2f} switches per pair, "
                f"{passed.per_radian:.2f} per radian (Gaussian {passed.expected_per_radian:.2f}), "
                f"{passed.per_length:.3f} per unit of length"
            )
        for name, state in vars(centring_of_layer(layer, weight)).items():
            print(
                f"  {name:13}  nearest tie {state.smallest:.1e}, median {state.median:.3f}, "
                f"{state.coalitions} coalitions, {state.effective:.1f} in even use"
            )
    layer = trace.layers[2]
    expert = int(layer.experts[10, 0])
    cut = slice_layer(layer, weights[layer.name], (10, 11, 12), epsilon=0.1, expert=expert)
    slice_figure(cut).savefig(folder / "slice.png", dpi=300)
    (folder / "slice.html").write_text(slice_page(cut, "Layer 2 of the model in the box"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="for the pictures")
    main(parser.parse_args().folder)
