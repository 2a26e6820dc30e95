"""The same jobs by Tieline and by what people use instead, in one run.

    capture    against the forward hooks that people paste: top k + 1 of each router's logits
    check      against a NumPy loop over layers that counts the same faults
    pieces     `regions` against `relucent` (PyPI) on dense ReLU networks
    fits       `MoERegressor` against expectation-maximisation: a plain loop of scikit-learn's
               logistic and linear regressions. Of public packages `gmr` (PyPI) installs, whose
               mixtures of 4 to 32 Gaussians do not reach the error of either: not compared

Contestants take turns and process CPU time is compared, one thread. Before any timing the results
of both sides are compared: equal choices and scores, equal counts, equal sets of activation
patterns, held-out errors within 2 %. relucent is left out where it is not installed. A ratio below
1 means that Tieline takes less.

    python benchmarks/peers.py [--rounds 9] [--only capture,check,pieces,fits] [--json FILE]
"""

import argparse
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression

import tieline as tl
from capture import olmoe
from harness import Ratio, interleave, ratio, report
from tieline.lab.estimation import MoERegressor
from tieline.lab.tropical import regions

Runs = dict[str, Callable[[], Any]]
SAME = 0.02  # relative difference of held-out errors up to which two fits are the same
DENSE = ((20, 2), (12, 3))  # width and input dimension of the networks whose pieces are listed
ROWS, WIDTH, EXPERTS, NOISE = 4000, 4, 4, 0.3  # of the table to fit


def compare(job: str, ours: Callable[[], Any], rivals: Runs, rounds: int) -> list[Ratio]:
    """Ratios of CPU time, ours over each rival's, from interleaved rounds."""
    samples = interleave({"tieline": ours, **rivals}, rounds, warmup=1)
    return [ratio(f"{job} / {name}", samples["tieline"], samples[name]) for name in rivals]


def hooked_routes(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and experts (layers, tokens, k + 1) by the hooks that people paste."""
    scores, experts, handles = [], [], []
    rank = model.config.num_experts_per_tok + 1

    def keep_routes(module: Any, arguments: Any, output: Any) -> None:
        top = output[0].detach().float().topk(rank, dim=-1)
        scores.append(top.values.cpu())
        experts.append(top.indices.cpu())

    for layer in model.model.layers:
        handles.append(layer.mlp.gate.register_forward_hook(keep_routes))
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return torch.stack(scores), torch.stack(experts)


def captured_routes(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by `tieline.capture`, which also checks that the scores explain the choice."""
    with tl.capture(model, ranks=1, epsilons=(), distances=False) as recorder:
        model(input_ids=ids)
    layers = recorder.trace().layers
    rank = model.config.num_experts_per_tok + 1
    scores = [layer.scores[:, :rank] for layer in layers if layer.scores is not None]
    return torch.stack(scores), torch.stack([layer.experts[:, :rank] for layer in layers])


def without_arithmetic(model: Any) -> Any:
    """The model with attention and experts that return their input: routers and little else."""
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
        layer.mlp.experts.forward = lambda hidden_states, *_: hidden_states
    return model


def capture_ratios(rounds: int) -> list[Ratio]:
    """Forward passes with capture over passes with hooks, thick and thin experts.

    Recording is a hundredth of a pass, less than its noise on a shared machine, so that passes
    without attention and experts are compared as well.
    """
    ratios = []
    for layers, width, expert_width in ((4, 512, 256), (16, 64, 8)):
        whole, bare = (olmoe(layers, width, expert_width) for _ in range(2))
        job = f"capture, {layers} layers of width {width}"
        ratios += compare_captures(job, whole, rounds)
        ratios += compare_captures(f"{job}, routers alone", without_arithmetic(bare), rounds)
    return ratios


def compare_captures(job: str, model: Any, rounds: int) -> list[Ratio]:
    """Passes of one model with capture over its passes with hooks, after a look at the routes."""
    ids = torch.randint(1, 512, (4, 512))
    with torch.inference_mode():
        ours, hooks = captured_routes(model, ids), hooked_routes(model, ids)
        assert torch.equal(ours[0].float(), hooks[0])
        tied = (hooks[0][..., 1:] == hooks[0][..., :-1]).any(dim=-1)  # hooks order these anyhow
        assert torch.equal(ours[1].long()[~tied], hooks[1][~tied])
        runs: Runs = {"hooks": lambda: hooked_routes(model, ids)}
        return compare(job, lambda: captured_routes(model, ids), runs, rounds)


def faulty_routes(tokens: int = 8192, layers: int = 24, k: int = 8, experts: int = 64) -> Any:
    """Two arrays (tokens, layers, k) of random choices with planted faults of six kinds."""
    rng = np.random.default_rng(0)

    def choices(number: int) -> np.ndarray:
        return np.argsort(rng.random((tokens, number), dtype=np.float32), axis=1)[:, :k]

    first, second = (
        np.stack([choices(experts) for _ in range(layers)], axis=1).astype(np.uint8)
        for _ in range(2)
    )
    first[1000:1500, 3, 1] = first[1000:1500, 3, 0]
    first[2000:2010, 5, 2] = 200
    first[:, 7] = first[0, 7]
    first[100:140] = 0
    first[4000:4400] = first[4000]
    second[:, 9] = choices(experts - 16)
    return first, second, experts


def looped_faults(ids: np.ndarray, experts: int) -> dict[str, int]:
    """Rows of zeros, ids twice or out of range, constant layers, copies and unused experts."""
    zero = (ids == 0).all(axis=(1, 2))
    written = ids[~zero]
    counts = {"zeros-inside": int(zero.sum()), "twice": 0, "outside": 0, "constant": 0, "dead": 0}
    for layer in range(ids.shape[1]):
        column = written[:, layer]
        ordered = np.sort(column, axis=1)
        counts["twice"] += int((ordered[:, 1:] == ordered[:, :-1]).any(axis=1).sum())
        counts["outside"] += int(((column < 0) | (column >= experts)).any(axis=1).sum())
        inside = column[(column >= 0) & (column < experts)]
        loads = np.bincount(inside, minlength=experts)
        if len(np.unique(column, axis=0)) == 1:
            counts["constant"] += 1
        if loads[loads > 0].min() >= 5:
            counts["dead"] += int((loads == 0).sum())
    copies = np.unique(written.reshape(len(written), -1), axis=0, return_counts=True)[1].max()
    counts["copies"] = int(copies) if copies > 8 else 0
    return counts


def checked_faults(ids: np.ndarray, experts: int) -> dict[str, int]:
    """The same counts by `tieline.check`, which also looks for faults that the loop does not."""
    names = ("zeros-inside", "twice", "outside", "constant", "dead", "copies")
    counts: dict[str, int] = dict.fromkeys(names, 0)
    for finding in tl.check(ids, n_experts=experts).findings:
        if finding.kind == "dead-experts":
            counts["dead"] += finding.count
        elif finding.kind == "repeated-rows" and finding.case != "layer-run":
            counts["copies"] += finding.count
        elif finding.case == "constant":
            counts["constant"] += 1
        elif finding.case in counts:
            counts[finding.case] += finding.count
    return counts


def check_ratios(rounds: int) -> list[Ratio]:
    """Checks of two arrays of 8,192 tokens x 24 layers x 8 ids over the loop's."""
    first, second, experts = faulty_routes()
    arrays = {"faulty": first, "a lost rank": second}
    ratios = []
    for name, ids in arrays.items():
        ours, loop = checked_faults(ids, experts), looped_faults(ids, experts)
        assert ours == loop, (ours, loop)
        runs: Runs = {"NumPy loop": lambda ids=ids: looped_faults(ids, experts)}
        ratios += compare(
            f"check, {name}", lambda ids=ids: checked_faults(ids, experts), runs, rounds
        )
    return ratios


def pieces_ratios(rounds: int) -> list[Ratio]:
    """Listings of the pieces of dense networks over relucent's breadth-first search."""
    if find_spec("relucent") is None:
        print("pieces: relucent is not installed, left out")
        return []
    relucent, ratios = import_module("relucent"), []
    for width, dim in DENSE:
        torch.manual_seed(0)
        hidden = torch.nn.Linear(dim, width).double()
        network = torch.nn.Sequential(hidden, torch.nn.ReLU(), torch.nn.Linear(width, 1).double())
        dense = torch.zeros(1, dim), torch.zeros(1), hidden.weight[None], hidden.bias[None]

        def search(network: Any = network) -> Any:
            pieces = relucent.Complex(network)
            pieces.bfs(nworkers=1, verify=False, verbose=0)
            return pieces

        ours = {(pattern[0] > 0).tobytes() for pattern in regions(*dense, 1).patterns}
        assert ours == {(np.asarray(piece.ss_np).ravel() > 0).tobytes() for piece in search()}
        job = f"{len(ours)} pieces, H = {width}, d = {dim}"
        ratios += compare(
            job, lambda dense=dense: regions(*dense, 1), {"relucent": search}, min(3, rounds)
        )
    return ratios


class LoopedMixture:
    """Linear experts and a softmax gate by expectation-maximisation, from scikit-learn parts."""

    def __init__(self, starts: int = 4, most_steps: int = 60, seed: int = 0) -> None:
        self.starts, self.most_steps, self.seed = starts, most_steps, seed
        self.fits: list[tuple[float, Any, list[LinearRegression]]] = []

    def fit(self, x: np.ndarray, y: np.ndarray) -> "LoopedMixture":
        """Keep the start with the largest likelihood."""
        rng = np.random.default_rng(self.seed)
        self.fits = [self._one_start(x, y, rng) for _ in range(self.starts)]
        self.best = max(self.fits, key=lambda fit: fit[0])
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Σ_e π_e(x) B_e (x, 1)."""
        _, gate, experts = self.best
        outputs = np.stack([expert.predict(x) for expert in experts], axis=1)
        return (gate.predict_proba(x) * outputs).sum(axis=1)

    def _one_start(self, x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> Any:
        labels = np.repeat(np.arange(EXPERTS), len(x))
        logits = x @ rng.normal(size=(x.shape[1], EXPERTS))
        share = np.exp(logits - logits.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        before, total, gate, experts = -np.inf, -np.inf, None, []
        for _ in range(self.most_steps):
            gate = LogisticRegression(C=1e3, max_iter=200)  # regions have sharp edges
            gate.fit(np.tile(x, (EXPERTS, 1)), labels, share.T.ravel() + 1e-12)
            experts = [LinearRegression().fit(x, y, weights + 1e-12) for weights in share.T]
            squares = np.stack([(y - expert.predict(x)) ** 2 for expert in experts], axis=1)
            variance = (share * squares).sum() / len(x)
            log_joint = gate.predict_log_proba(x) - squares / (2 * variance)
            log_likelihood = np.logaddexp.reduce(log_joint, axis=1)
            share = np.exp(log_joint - log_likelihood[:, None])
            total = float(log_likelihood.sum() - len(x) / 2 * np.log(2 * np.pi * variance))
            if total - before < 1e-4 * abs(total):
                break
            before = total
        return total, gate, experts


def regression_table(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows in as many regions as experts, where another linear model holds in each."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, WIDTH))
    region = (x @ rng.normal(size=(WIDTH, EXPERTS))).argmax(axis=1)
    models = rng.normal(size=(EXPERTS, WIDTH + 1))
    exact = (np.column_stack([x, np.ones(rows)]) * models[region]).sum(axis=1)
    return x, exact + NOISE * rng.normal(size=rows)


def fit_ratios(rounds: int) -> list[Ratio]:
    """Fits of four experts to 4,000 rows from four starts, over expectation-maximisation."""
    x, y = regression_table(2 * ROWS)
    train, test = (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])

    def regressor() -> Callable[[np.ndarray], np.ndarray]:
        return MoERegressor(EXPERTS, n_init=4, random_state=0).fit(*train).predict

    def looped() -> Callable[[np.ndarray], np.ndarray]:
        return LoopedMixture().fit(*train).predict

    ours, loop = (float(np.mean((run()(test[0]) - test[1]) ** 2)) for run in (regressor, looped))
    print(f"held-out mean squared error {ours:.4f}, the loop's {loop:.4f}, noise {NOISE**2:g}")
    assert abs(ours / loop - 1) <= SAME
    return compare("fit", regressor, {"loop of scikit-learn fits": looped}, min(3, rounds))


JOBS: dict[str, Callable[[int], list[Ratio]]] = {
    "capture": capture_ratios,
    "check": check_ratios,
    "pieces": pieces_ratios,
    "fits": fit_ratios,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of rivals that did not converge
    ratios = [row for job in options.only.split(",") for row in JOBS[job](options.rounds)]
    report("Tieline against its peers", ratios, options.json)


if __name__ == "__main__":
    main()
