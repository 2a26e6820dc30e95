"""A quantised router, priced: what four bits cost, and which routers to leave in float32.

python examples/router_precision.py [tokens]

The routers of a model are a thousandth of its weights, so quantising them saves next to nothing;
their choice, however, is all or nothing. This audits the routers of the model in the box in three
formats, then keeps the routers in float32 that do most of the damage.
"""

import argparse

from tieline import Model, audit
from tieline.models.demo import demo_text
from tieline.run.condition import Perturbation

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("tokens", type=int, nargs="?", default=16384, help="of the text in the box")
tokens = parser.parse_args().tokens
loaded = Model.open(dtype="fp32")
formats = ("int4", "int4_group", "int8")
result = audit(
    (loaded.module, loaded.tokenizer),
    text=demo_text(),
    tokens=tokens,
    sequence_length=min(512, tokens // 2),
    perturbations=[Perturbation("rounding", name) for name in formats],
    recover=0.5,
    remedies=(),
)

print("1. What the format does to the routing, and what that costs:")
for row in result.effects:
    assert row.full.value is not None
    assert row.predicted is not None
    assert row.by_flips is not None
    same = 1 - row.full.value
    print(
        f"   {row.level:10s} {100 * same:5.1f} % of choices kept "
        f"(predicted {100 - 100 * row.predicted:.1f} % per router), "
        f"KL {row.kl.value:.2g} nats, {100 * row.by_flips:.0f} % of it by flips"
    )

print("2. Which routers to leave in float32 for half of the damage:")
for row in result.effects:
    keep = row.keep
    assert keep is not None
    assert keep.recovered_kl is not None
    layers = ", ".join(name.split(".")[2] for name in keep.layers)
    print(
        f"   {row.level:10s} layers {layers}: {100 * keep.recovered:.0f} % of the damage and "
        f"{100 * keep.recovered_kl:.0f} % of the KL gone for {keep.bytes:,} bytes"
    )

weights = sum(weight.numel() for weight in loaded.module.parameters())
first = result.effects[0].keep
assert first is not None
every = first.bytes_all
print(
    f"3. All routers in float32 instead of int4: {every:,} bytes more, beside {weights:,} weights"
)
print(f"   {result.verdict}")
