"""Walk across a tie: the output of a top-k layer jumps, that of a smooth one does not.

python examples/tie_walk.py [tie_walk.png]
"""

import argparse

import matplotlib.pyplot as plt
import torch

from tieline import Experts, LinearRouter, MoE, SmoothTopK, TopK, gap

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
parser.add_argument("picture", nargs="?", default="tie_walk.png")
picture = parser.parse_args().picture
torch.manual_seed(0)
EXPERTS, WIDTH, K = 8, 16, 2
router, experts = LinearRouter(WIDTH, EXPERTS), Experts(EXPERTS, WIDTH, 32)
layers = {
    "top-k": MoE(router, TopK(K), experts).double(),
    "smooth top-k": MoE(router, SmoothTopK(K, epsilon=0.3), experts).double(),
}

# A line through a tie: the token is moved along w_i - w_j onto the wall between ranks k and k+1.
x = torch.randn(WIDTH, dtype=torch.float64)
i, j = router(x).argsort(descending=True)[K - 1 : K + 1]
normal = (router.weight[i] - router.weight[j]).detach()
tie = x - gap(router(x), K) / normal.square().sum() * normal
normal = normal / normal.norm()

with torch.no_grad():  # the output coordinate that jumps most
    sides = [layers["top-k"](tie + side * 1e-9 * normal) for side in (-1, 1)]
channel = (sides[1] - sides[0]).abs().argmax()

figure, (walk, steps) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
t = torch.linspace(-0.4, 0.4, 2001, dtype=torch.float64)
sizes = torch.logspace(-10, -1, 40, dtype=torch.float64)
for name, layer in layers.items():
    with torch.no_grad():
        line = layer(tie + t[:, None] * normal)
        ends = [layer(tie + side * sizes[:, None] / 2 * normal) for side in (-1, 1)]
    change = (ends[1] - ends[0]).norm(dim=-1)
    walk.plot(t, line[:, channel], label=name)
    steps.loglog(sizes, change, label=name)
    print(f"{name:13s} step 1e-10 across the tie changes the output by {change[0]:.1e}")
walk.set(
    xlabel="distance from the tie", ylabel="output coordinate", title="Along the normal of a wall"
)
steps.set(xlabel="step across the tie", ylabel="change of the output", title="Smaller steps")
walk.legend()
figure.savefig(picture, dpi=150)
