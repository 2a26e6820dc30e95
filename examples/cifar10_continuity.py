"""Are the layers of a trained model continuous? Paper 1, Figures 1 and 3, on CIFAR-10.

tieline train cifar10-small-smoe --out runs/cifar10
python examples/cifar10_continuity.py runs/cifar10 [continuity.png] [continuity.json]

Every layer of the trained model is walked across the ties nearest to its own inputs, with hard
top-k and with smooth top-k of two ramps on the same weights.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tieline.lab.geometry.layer_continuity import layer_inputs, measure_continuity
from tieline.lab.report.studies import continuity_figure
from tieline.lab.training.image_data import load_cifar10
from tieline.lab.training.image_tasks import image_model
from tieline.lab.training.recipes import CIFAR10_GATES, cifar10_small
from tieline.routing import MoE

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", type=Path, help="of the run")
parser.add_argument("figure", type=Path, nargs="?", default=Path("continuity.png"))
parser.add_argument("json", type=Path, nargs="?", help="write the records as well")
given_by_user = parser.parse_args()
folder, figure = given_by_user.folder, given_by_user.figure
name = json.loads((folder / "config.json").read_text())["gate"]["name"]
assert name in CIFAR10_GATES
torch.manual_seed(0)
model = image_model(cifar10_small(name)).eval()
model.load_state_dict(load_file(folder / "model" / "model.safetensors"))

inputs = layer_inputs(model, pixels=load_cifar10("test").subset(512).pixels)
rows = []
print(
    "layer       ε  gate     jump at 1e-9: median, largest  exponent  events: worst  slope  experts"
)
for number, (path, given) in enumerate(inputs.items(), start=1):
    layer = model.get_submodule(path)
    assert isinstance(layer, MoE)
    record = measure_continuity(layer, given, name=f"layer {number}")
    rows.append(record)
    for label, gate in record.gates.items():
        jumps = f"{gate.median[0]:18.1e} {gate.largest[0]:8.1e}"
        line = f"{gate.line.events:7d} {gate.line.relative:8.1e}"
        print(
            f"{number:5d} {record.epsilon:7.3f}  {label:7s}{jumps}{gate.exponent:11.3f} {line}"
            f"{gate.slope:7.2f} {gate.experts:7.2f}"
        )
continuity_figure(rows).savefig(figure, dpi=200)
if given_by_user.json is not None:
    given_by_user.json.write_text(json.dumps([record.to_dict() for record in rows]))
