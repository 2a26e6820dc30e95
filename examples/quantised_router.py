"""A quantised router: how far may the router's numbers be cut before other experts are chosen?

python examples/quantised_router.py [tokens]

Only the routers of the model in the box are put into each format; experts and attention stay in
float32. `tieline audit` goes further: every format and noise level, what it costs in loss, and
which layers to keep in float32.
"""

import argparse
import copy

from tieline import Model
from tieline.analysis.compared_sides import ModelSide
from tieline.analysis.diff import diff_models
from tieline.models.demo import demo_text
from tieline.run.corpus import tokenise

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("tokens", type=int, nargs="?", default=8192, help="of the text in the box")
tokens = parser.parse_args().tokens
loaded = Model.open()
text = tokenise(loaded.tokenizer, demo_text(), tokens, 256).sequences
other = copy.deepcopy(loaded.module)
print("router      worst layer   tokens   near-ties   noise    KL")
for name in ("bf16", "fp8_e4m3", "int8", "int4_group", "int4"):
    comparison = diff_models(
        ModelSide(loaded.module), ModelSide(other, name, region="router"), text
    )
    flips = sum(layer.flip.count for layer in comparison.layers)
    odd = sum(layer.attribution.unexplained for layer in comparison.layers if layer.attribution)
    noise = max(layer.attribution.noise for layer in comparison.layers if layer.attribution)
    m = comparison.metrics
    print(
        f"{name:11s} {100 * m['flip']:10.1f} % {100 * m['flip:any']:6.1f} % "
        f"{100 * (1 - odd / max(flips, 1)):9.0f} % {noise:8.2g} {m['kl']:8.1e}"
    )
