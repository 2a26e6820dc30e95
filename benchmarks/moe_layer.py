"""The MoE layer against its rivals and against the arithmetic alone.

Contestants, all with the same shapes and, but for st-moe, the same weights:

    floor        the expert products only, into preallocated buffers that are used again
    floor-alloc  the same products, each with a fresh result
    topk         ours: linear router, TopK, swiglu experts
    smooth       ours with SmoothTopK, ε set to k + 0.5 experts on this batch
    projected    ours with ProjectedTopK, ε set in the same way
    grouped_mm   transformers' Mixtral block, experts_implementation="grouped_mm"
    eager        the same, "eager"
    st-moe       st-moe-pytorch (its experts are not gated and drop tokens beyond capacity)

    python benchmarks/moe_layer.py [--rounds 24] [--shape 0 1 2 3] [--quick] [--json PATH]
    python benchmarks/moe_layer.py --quick --device cuda

On an accelerator every step is waited for, wall time counts, and memory is not measured.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from harness import Ratio, Samples, interleave, peak_growth, peak_memory, ratio, report
from tieline import MoE, ProjectedTopK, SmoothTopK, TopK
from tieline.core.ranking import ranked_scores
from tieline.measure.boundary import epsilon_for_extra
from tieline.models.band_width import budget_epsilon
from tieline.routing import Experts, LinearRouter

SHAPES = [(512, 256, 8, 2, 512), (4096, 256, 64, 8, 128), (512, 1024, 64, 8, 256)]
SHAPES += [(4096, 1024, 8, 2, 256)]  # tokens, width, experts, k, expert width
RIVAL_TARGETS = [0.8, 0.7, 0.7, 0.7]  # forward + backward against grouped_mm
FLOOR_TARGET = 1.35
Shape = tuple[int, int, int, int, int]


def floor(shape: Shape, backward: bool, allocate: bool) -> Callable[[], None]:
    tokens, width, experts, k, hidden = shape
    rows = tokens * k // experts
    w_in, w_out = torch.randn(experts, 2 * hidden, width), torch.randn(experts, width, hidden)
    x, h, a = torch.randn(rows, width), torch.randn(rows, hidden), torch.randn(rows, 2 * hidden)
    out = {name: torch.empty_like(like) for name, like in [("x", x), ("h", h), ("a", a)]}
    grad_in, grad_out = torch.empty_like(w_in), torch.empty_like(w_out)

    def product(left: Tensor, right: Tensor, into: Tensor) -> None:
        torch.mm(left, right) if allocate else torch.mm(left, right, out=into)

    def run() -> None:
        for e in range(experts):
            product(x, w_in[e].T, out["a"])
            product(h, w_out[e].T, out["x"])
        for e in range(experts if backward else 0):
            product(x, w_out[e], out["h"])
            product(x.T, h, grad_out[e])
            product(a.T, x, grad_in[e])
            product(a, w_in[e], out["x"])

    return run


def mixtral(shape: Shape, implementation: str) -> torch.nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    _, width, experts, k, hidden = shape
    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_local_experts=experts,
        num_experts_per_tok=k,
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return block


def ours(shape: Shape, gate: torch.nn.Module) -> MoE:
    _, width, experts, _, hidden = shape
    layer = MoE(LinearRouter(width, experts), gate, Experts(experts, width, hidden))  # type: ignore[arg-type]
    rival = mixtral(shape, "eager")
    with torch.no_grad():
        layer.router.weight.copy_(rival.gate.weight)  # type: ignore[union-attr]
        layer.experts.w_in.copy_(rival.experts.gate_up_proj)  # type: ignore[union-attr]
        layer.experts.w_out.copy_(rival.experts.down_proj)  # type: ignore[union-attr]
    return layer


def st_moe(shape: Shape) -> Callable[[Tensor], Tensor]:
    from st_moe_pytorch import MoE as StMoE

    _, width, experts, k, hidden = shape
    mult: Any = hidden / width  # annotated as an integer, used as a factor
    layer = StMoE(dim=width, num_experts=experts, gating_top_n=k, expert_hidden_mult=mult)
    return lambda x: layer(x).outputs


def smooth_gate(shape: Shape, x: Tensor) -> SmoothTopK:
    """A gate whose band holds k + 0.5 experts on average for this batch."""
    k = shape[3]
    with torch.no_grad():
        scores = ours(shape, TopK(k)).router(x.flatten(0, -2))
    ranked = ranked_scores(scores, shape[2])
    return SmoothTopK(k, epsilon=epsilon_for_extra(ranked, k, 0.5).value)


def projected_gate(shape: Shape, x: Tensor) -> ProjectedTopK:
    """The same for the projection, which enters an expert later: its ε is the larger one."""
    k = shape[3]
    with torch.no_grad():
        scores = ours(shape, TopK(k)).router(x.flatten(0, -2)).double()
    return ProjectedTopK(k, epsilon=budget_epsilon(scores, k, shape[2], k + 0.5, gate="projected"))


def build(name: str, shape: Shape, x: Tensor) -> Callable[[Tensor], Tensor]:
    makers: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "topk": lambda: ours(shape, TopK(shape[3])),
        "smooth": lambda: ours(shape, smooth_gate(shape, x)),
        "projected": lambda: ours(shape, projected_gate(shape, x)),
        "grouped_mm": lambda: mixtral(shape, "grouped_mm"),
        "eager": lambda: mixtral(shape, "eager"),
        "st-moe": lambda: st_moe(shape),
    }
    return makers[name]()


LAYERS = ["topk", "smooth", "projected", "grouped_mm", "eager", "st-moe"]
SLOW_ROUNDS = 6  # of the rivals without a target, some of which take seconds a step


def step(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor | None) -> None:
    """One forward, and one backward with gradients dropped afterwards, as `zero_grad` does."""
    if grad is None:
        with torch.no_grad():
            layer(x)
        return
    layer(x).backward(grad)
    x.grad = None
    for parameter in layer.parameters() if isinstance(layer, torch.nn.Module) else ():
        parameter.grad = None


def waited_for(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The work until the accelerator has done it."""

    def run() -> None:
        work()
        torch.get_device_module(device).synchronize()

    return run


def inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(1, shape[0], shape[1])
    return x.requires_grad_(), torch.randn_like(x)


def time_shape(shape: Shape, rounds: int, backward: bool, quick: bool) -> dict[str, Samples]:
    """Samples of all contestants; those without a target run apart, against `topk` again."""
    x, grad = inputs(shape)
    run: dict[str, Callable[[], object]] = {
        "floor": floor(shape, backward, allocate=False),
        "floor-alloc": floor(shape, backward, allocate=True),
    }
    for name in LAYERS[: 4 if quick else None]:
        layer = build(name, shape, x)
        run[name] = lambda layer=layer: step(layer, x, grad if backward else None)
    if x.device.type != "cpu":
        run = {name: waited_for(work, x.device) for name, work in run.items()}
    slow = {name: run.pop(name) for name in LAYERS[4:] if name in run}
    samples = interleave(run, rounds)
    if quick:
        return samples
    again = interleave({"topk": run["topk"], **slow}, SLOW_ROUNDS, warmup=1)
    return {
        **samples,
        **{f"{name} apart" if name == "topk" else name: s for name, s in again.items()},
    }


def ratios_of(shape: Shape, index: int, samples: dict[str, Samples], backward: bool) -> list[Ratio]:
    phase = "fwd+bwd" if backward else "fwd"
    title = f"{shape} {phase}"
    rival = RIVAL_TARGETS[index] if backward else 1.0
    pairs = [
        ("topk", "grouped_mm", rival),
        ("topk", "floor", FLOOR_TARGET if backward else None),
        ("topk", "floor-alloc", None),
        ("topk apart", "eager", None),
        ("topk apart", "st-moe", None),
        ("smooth", "topk", 1 + 0.5 / shape[3] + 0.05),
        ("projected", "smooth", 1.05 if backward else None),
    ]
    return [
        ratio(f"{title}: {a} / {b}", samples[a], samples[b], target, clock)
        for a, b, target in pairs
        if a in samples and b in samples
        for clock in ("cpu", "wall")
    ]


def memory_ratio(index: int) -> tuple[Ratio, dict[str, int]]:
    peaks = {
        name: peak_memory(__file__, "--child", name, "--shape", str(index))
        for name in ("topk", "grouped_mm")
    }
    value = peaks["topk"] / peaks["grouped_mm"]
    title = f"{SHAPES[index]} peak memory: topk / grouped_mm"
    return Ratio(title, "bytes", value, value, value, 1.0), peaks


def child(name: str, shape: Shape) -> None:
    x, grad = inputs(shape)
    layer = build(name, shape, x)
    step(layer, x[:, :8], grad[:, :8])  # load kernels before the peak is counted
    print(peak_growth(lambda: [step(layer, x, grad) for _ in range(3)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--shape", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--quick", action="store_true", help="leave out rivals without a target")
    parser.add_argument("--json")
    parser.add_argument("--device", default="cpu", help="where all layers run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, SHAPES[options.shape[0]])
        return
    if options.device == "fake":  # the pretended accelerator of the tests
        from tests.device.pretended import register

        register()
    if options.device != "cpu":
        torch.set_default_device(options.device)
    results: list[Ratio] = []
    medians: dict[str, object] = {}
    for index in options.shape:
        for backward in (False, True):
            samples = time_shape(SHAPES[index], options.rounds, backward, options.quick)
            results += ratios_of(SHAPES[index], index, samples, backward)
            key = f"{SHAPES[index]} {'fwd+bwd' if backward else 'fwd'}"
            medians[key] = {
                name: {"cpu": median(s.cpu), "wall": median(s.wall)} for name, s in samples.items()
            }
        if options.device != "cpu":
            continue
        memory, peaks = memory_ratio(index)
        results.append(memory)
        medians[f"{SHAPES[index]} peak bytes"] = peaks
    if options.device != "cpu":  # the targets are those of the CPU
        results = [replace(x, target=None) for x in results]
    report("MoE layer", results, options.json, medians=medians)


if __name__ == "__main__":
    main()
