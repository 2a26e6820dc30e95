"""Figures 6, 7 and section B.2: the experiments that run here as they are."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from tieline.geometry.order import near_counts
from tieline.routing import ReLUGate, SmoothTopK, Softmax, TopK
from tieline.studies.checks import at_least, at_most, near
from tieline.studies.claim import Evidence, Run
from tieline.studies.figure import chart, line
from tieline.studies.registry import claim


def trained_scores(run: Run) -> tuple[list[Tensor], int, str]:
    """Router scores per layer of the trained model in the box, k, and where they come from."""
    if find_spec("transformers") is None:
        return [run.normal(4_000, 16, stream=s) for s in range(4)], 2, "normal scores"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from tieline.hf import capture
    from tieline.hf.shipped import load_shipped_model, load_shipped_tokenizer, shipped_text

    text = load_shipped_tokenizer()(shipped_text(), return_tensors="pt")["input_ids"]
    n = run.size(2_048, 16_384)
    with (
        torch.no_grad(),
        capture(model := load_shipped_model(), ranks="all", distances=False) as rec,
    ):
        model(text[:, :n].reshape(-1, 256))
    layers = list(rec.trace().layers)
    return (
        [layer.scores.double() for layer in layers if layer.scores is not None],
        layers[0].facts.k,
        "the model in the box",
    )


@claim(
    "p1-fig6-7",
    "Figures 6, 7",
    "experts near the boundary against ε",
    statement="In a trained model with 16 experts, top 2, the mean number of experts within ε of "
    "z_[k] grows with ε on [0, 1] and on [1, 4].",
    tested="Reproduced at small scale, on the trained model that ships with the package, as it is "
    "(the paper follows a larger one through training): K(ε) in each layer is k at 0, rises, and "
    "is at most E.",
    seconds=4,
)
def near_experts(run: Run) -> Evidence:
    """K(ε) per layer."""
    layers, k, source = trained_scores(run)
    grid = [0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0]
    checks, series = [], []
    for place, scores in enumerate(layers):
        mean = near_counts(scores, k, grid).double().mean(dim=0)
        checks.append(near(f"layer {place}: K at 0.001", mean[0].item(), k, 0.05))
        checks.append(at_least(f"layer {place}: smallest rise", mean.diff().min().item(), 0))
        checks.append(at_most(f"layer {place}: K at 4", mean[-1].item(), scores.shape[1]))
        series.append(line(f"layer {place}", grid, mean))
    half = next(e for e, m in zip(grid, series[0]["y"], strict=True) if m >= k + 0.5)
    return Evidence(
        checks,
        paper="grows from k",
        measured=f"k + ½ by ε = {half} ({source})",
        figure=chart("ε", "mean number of experts K(ε)", series, x_scale="log"),
    )


@claim(
    "p1-secB.2",
    "sec. B.2",
    "against SMEAR, Soft MoE and ReMoE",
    statement="Soft MoE and SMEAR are smooth but dense and not causal; ReMoE is continuous but "
    "does not fix the number of experts; smooth top-k is continuous, sparse and causal.",
    tested="Number of experts per token and jumps at ties of each gate on the same scores; "
    "influence of a later token on an earlier output under Soft MoE's dispatch.",
)
def rivals(run: Run) -> Evidence:
    """Experts in use, jumps, and influence of later tokens."""
    scores = run.normal(run.size(5_000, 50_000), 16, stream=1)
    use = {
        name: (gate(scores) > 0).sum(dim=1).double()
        for name, gate in (
            ("softmax", Softmax()),
            ("relu", ReLUGate()),
            ("smooth", SmoothTopK(2, epsilon=0.15)),
        )
    }
    jumps = {
        name: _jump(gate)
        for name, gate in (
            ("top-k", TopK(2)),
            ("relu", ReLUGate()),
            ("smooth", SmoothTopK(2, epsilon=0.15)),
            ("softmax", Softmax()),
        )
    }
    return Evidence(
        [
            near("experts of softmax gates", use["softmax"].mean().item(), 16, 0),
            at_least("spread of ReLU's number of experts", use["relu"].std().item(), 1),
            at_most("mean experts of smooth top-k", use["smooth"].mean().item(), 3),
            at_least("least experts of smooth top-k", use["smooth"].min().item(), 2),
            at_most(
                "jump of ReLU, smooth top-k and softmax",
                max(jumps[name] for name in ("relu", "smooth", "softmax")),
                1e-6,
            ),
            at_least("jump of top-k", jumps["top-k"], 0.1),
            at_least("influence of a later token in Soft MoE", _soft_moe_influence(run), 1e-3),
        ],
        paper="a comparison",
        measured=f"{use['smooth'].mean().item():.2f} experts (smooth), "
        f"{use['relu'].mean().item():.2f} ± {use['relu'].std().item():.2f} (ReLU)",
    )


def _jump(gate: torch.nn.Module) -> float:
    """Largest change of a weight between the two sides of a tie at distance 1e-9."""
    base = torch.tensor([[1.0, 0.5, 0.5, -0.3, 0.0]], dtype=torch.float64)
    push = torch.tensor([[0.0, 1.0, -1.0, 0.0, 1.0]], dtype=torch.float64) * 1e-9
    return (gate(base + push) - gate(base - push)).abs().max().item()


def _soft_moe_influence(run: Run) -> float:
    """Change of the first token's output when the last token changes, four slots."""
    x, slots = run.normal(8, 6, stream=2), run.normal(6, 4, stream=3)
    other = x.clone()
    other[-1] += 1.0
    outputs = []
    for tokens in (x, other):
        logits = tokens @ slots
        mixed = torch.softmax(logits, dim=0).T @ tokens
        outputs.append((torch.softmax(logits, dim=1) @ mixed.tanh())[0])
    return (outputs[1] - outputs[0]).norm().item()
