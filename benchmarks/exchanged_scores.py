"""How well `diff` tells experts with each other's scores from sound runs that look like them.

    python -m benchmarks.exchanged_scores open OUT [--seed 0] [--until 04:10]
    python -m benchmarks.exchanged_scores closed OUT

Written before the rule was run on any of it, which was made on one kind of fault (ranks k and k + 1
of some tokens) and one set of families. Here are other families, faults of a sort, a gather, a
mask or a table of ids, and sound runs: spikes of one score, equal scores in another order, rows of
routers that are nearly or exactly equal, quantised routers, copies of experts. The halves share
neither families nor faults nor seeds.
"""

import argparse
import copy
import json
import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.utils import logging

import tieline as tl
from benchmarks.blind.precisions import cast
from tests.models import tiny
from tieline.analysis.compared_sides import ModelSide, trace_model
from tieline.models import find_routers

FAMILIES = {
    "open": ["afmoe", "aria", "deepseek_v2", "exaone_moe", "jamba", "cohere2_moe", "qwen3_next"],
    "closed": ["lfm2_moe", "hy_v3", "mellum", "laguna", "llama4", "glm4_moe_lite", "minimax"],
}
FAMILIES["closed"] += ["mimo_v2_flash", "kimi_linear"]
UNITS = {"fp32": 2**-22}
"""Noise of scores over their spread, where it is not 2⁻⁸. In the first run of the open half it was
2⁻⁸ in float32 too, and the alarms on those eight pairs were right: that is no float32."""
PRECISIONS = ("fp32", "bf16", "bf16-emulated", "int8-emulated")
EXPERTS, DOCUMENTS, LENGTH = 24, 20, 96


class Letters:
    """A tokenizer that is never asked: the token ids are those of the trace."""

    is_fast = False


class RouterScores(TorchFunctionMode):
    """Within it the products of one router pass through `change`, in copies of the model too."""

    def __init__(self, model, index, change):
        """Routers are known by the shape of their matrix, and one of them by its turn."""
        super().__init__()
        routers = list(find_routers(model).values())
        self.shapes = {p.shape for router in routers for p in router.parameters() if p.ndim == 2}
        self.index, self.count = index % len(routers), len(routers)
        self.change, self.calls, self.changed = change, 0, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Change the product where the matrix is the router's."""
        result = function(*args, **(kwargs or {}))
        if function is F.linear and args[1].shape in self.shapes and result.shape[-1] == EXPERTS:
            self.calls += 1
            if (self.calls - 1) % self.count == self.index:
                self.changed += 1
                return self.change(result)
        return result


def some_rows(shape, share, generator):
    """Indices of a share of the rows."""
    return (torch.rand(shape[0], generator=generator) < share).nonzero().squeeze(1)


# Faults of a file: what an engine wrote, while its model was right.


def ids_of_rows(edit, share):
    """A fault of the ids of some tokens in one layer: `edit(experts, facts, generator)`."""

    def changed(trace, generator):
        at = int(torch.randint(len(trace.layers), (), generator=generator))
        layer = trace.layers[at]
        rows = some_rows(layer.experts.shape, share, generator)
        experts = layer.experts.clone()
        experts[rows] = edit(layer.experts[rows], layer.facts, generator).to(experts)
        layers = [*trace.layers]
        layers[at] = replace(layer, experts=experts)
        return replace(trace, layers=layers)

    return changed


def ranks(*order):
    """Ranks k - 1, k, ... (counted from k) in another order."""

    def edit(experts, facts, generator):
        columns = torch.arange(experts.shape[1])
        swapped = [facts.k + x for x in sorted(order)]
        columns[swapped] = torch.tensor([facts.k + x for x in order])
        return experts[:, columns]

    return edit


def best_and_next(experts, facts, generator):
    """The best expert and the first that is not chosen have changed places."""
    columns = torch.arange(experts.shape[1])
    columns[0], columns[facts.k] = facts.k, 0
    return experts[:, columns]


def shuffled_tail(experts, facts, generator):
    """A sort that is wrong from the last chosen rank on."""
    tail = torch.randperm(experts.shape[1] - facts.k + 1, generator=generator) + facts.k - 1
    return experts[:, torch.cat((torch.arange(facts.k - 1), tail))]


def next_id(experts, facts, generator):
    """A table of ids off by one."""
    return (experts + 1) % facts.n_experts


def other_device(experts, facts, generator):
    """Experts of two devices exchanged."""
    return (experts + facts.n_experts // 2) % facts.n_experts


def pair_of_ids(experts, facts, generator):
    """Every even expert has the id of the odd one after it, and the other way round."""
    return (experts ^ 1).clamp(max=facts.n_experts - 1)


# Faults of the scores, inside the model.


def fixed_pairs(share, pairs):
    """Some pairs of experts have each other's scores in some tokens."""

    def change(scores, generator):
        flat = scores.flatten(0, -2)
        rows = some_rows(flat.shape, share, generator)
        order = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(7))
        i, j = order[:pairs], order[pairs : 2 * pairs]
        result = flat.clone()
        result[rows[:, None], i], result[rows[:, None], j] = (
            flat[rows[:, None], j],
            flat[rows[:, None], i],
        )
        return result.view_as(scores)

    return change


def row_below(scores, generator):
    """A gather that reads the scores of the next token, in some tokens."""
    flat = scores.flatten(0, -2)
    rows = some_rows(flat.shape, 0.03, generator)
    result = flat.clone()
    result[rows] = flat.roll(-1, 0)[rows]
    return result.view_as(scores)


def block_of_zeros(scores, generator):
    """A mask that is wrong: the scores of four experts are those of their neighbours."""
    flat = scores.flatten(0, -2)
    rows = some_rows(flat.shape, 0.04, generator)
    first = int(torch.randint(flat.shape[1] - 4, (), generator=generator))
    result = flat.clone()
    result[rows, first : first + 4] = flat[rows, first : first + 4].flip(1)
    return result.view_as(scores)


# Sound runs.


def spikes(rate, factor, precision):
    """One score in 1 / rate has `factor` times the noise of the precision."""
    unit = UNITS.get(precision, 2**-8)

    def change(scores, generator):
        size = factor * scores.float().std() * unit
        noise = size * torch.randn(scores.shape, generator=generator)
        hit = torch.rand(scores.shape, generator=generator) < rate
        return scores + (noise * hit).to(scores.dtype)

    return change


def token_scales(scores, generator):
    """Noise of bf16 whose size differs between tokens by the law of t₂.₅."""
    flat = scores.flatten(0, -2)
    wide = torch.randn((len(flat), 5), generator=generator).square().mean(1).rsqrt() ** 1.5
    noise = (
        flat.float().std() * 2**-8 * wide[:, None] * torch.randn(flat.shape, generator=generator)
    )
    return scores + noise.view_as(scores).to(scores.dtype)


@torch.no_grad()
def like_rows(distance):
    """Rows of the routers that are copies of others, in both runs."""

    def both(model, generator):
        for router in find_routers(model).values():
            for weight in [p for p in router.parameters() if p.ndim == 2 and len(p) >= 8]:
                half = len(weight) // 2
                noise = torch.randn(weight[:half].shape, generator=generator)
                weight[half : 2 * half] = weight[:half] * (1 + distance * noise)

    return both


def equal_in_order(trace, generator):
    """Experts with equal recorded scores stand in another order, also across rank k."""
    layers = []
    for layer in trace.layers:
        jitter = torch.rand(layer.scores.shape, generator=generator)
        order = (-jitter).argsort(dim=1)
        scores, experts = layer.scores.gather(1, order), layer.experts.gather(1, order)
        best = scores.double().argsort(dim=1, descending=True, stable=True)
        ordered = {"scores": scores.gather(1, best), "experts": experts.gather(1, best)}
        layers.append(replace(layer, **ordered))
    return replace(trace, layers=layers)


@torch.no_grad()
def quantised_routers(levels):
    """Routers whose rows are rounded to so many levels, in the second run."""

    def weights(model, generator):
        for router in find_routers(model).values():
            for weight in [p for p in router.parameters() if p.ndim == 2]:
                scale = weight.abs().amax(1, keepdim=True) / levels
                weight.copy_((weight / scale).round() * scale)

    return weights


# name: (slot, change, precisions); slots: "file", "scores", "both", "weights"
ALL, WIDE = PRECISIONS, PRECISIONS[:3]
CASES: dict[str, dict[str, dict[str, tuple[str, Any, tuple[str, ...]]]]] = {
    "open": {
        "faulty": {
            "ranks rotated by one": ("file", ids_of_rows(ranks(0, -1, 1), 0.04), WIDE),
            "best and next": ("file", ids_of_rows(best_and_next, 0.03), WIDE),
            "table of ids off by one": ("file", ids_of_rows(next_id, 0.03), WIDE),
            "two experts exchanged in a tenth": ("scores", fixed_pairs(0.1, 1), WIDE),
            "scores of the next token": ("scores", row_below, WIDE),
        },
        "sound": {
            "plain": ("both", lambda *_: None, ALL),
            "spikes 1e-2 × 100": ("scores", partial(spikes, 1e-2, 100), WIDE),
            "spikes 1e-3 × 30": ("scores", partial(spikes, 1e-3, 30), WIDE),
            "equal rows": ("both", like_rows(0.0), ALL),
            "rows 1e-3 apart": ("both", like_rows(1e-3), ALL),
            "equal scores in another order": ("file", equal_in_order, WIDE),
            "routers in 8 bits": ("weights", quantised_routers(127), ("int8-emulated",)),
        },
    },
    "closed": {
        "faulty": {
            "a sort wrong from rank k on": ("file", ids_of_rows(shuffled_tail, 0.04), WIDE),
            "ranks k and k + 2": ("file", ids_of_rows(ranks(1, 0, -1), 0.05), WIDE),
            "experts of two devices": ("file", ids_of_rows(other_device, 0.03), WIDE),
            "even and odd ids": ("file", ids_of_rows(pair_of_ids, 0.05), WIDE),
            "four pairs exchanged in a twentieth": ("scores", fixed_pairs(0.05, 4), WIDE),
            "four scores in reverse": ("scores", block_of_zeros, WIDE),
        },
        "sound": {
            "plain": ("both", lambda *_: None, ALL),
            "spikes 1e-2 × 30": ("scores", partial(spikes, 1e-2, 30), WIDE),
            "spikes 1e-3 × 100": ("scores", partial(spikes, 1e-3, 100), WIDE),
            "noise of tokens t₂.₅": ("scores", token_scales, ("bf16", "bf16-emulated")),
            "rows 1e-2 apart": ("both", like_rows(1e-2), ALL),
            "equal rows": ("both", like_rows(0.0), ALL),
            "equal rows in another order": ("both+file", (like_rows(0.0), equal_in_order), WIDE),
            "routers in 4 bits": ("weights", quantised_routers(7), ("int4-emulated",)),
        },
    },
}


def model_of(family, seed):
    """A random model of two layers or more with 24 experts and top-4."""
    for name, value in tiny.SMALL.items():
        if value == 8 and "expert" in name and not name.startswith("index"):
            tiny.SMALL[name] = EXPERTS
        elif value == 2 and ("per_tok" in name or "top" in name) and name != "topk_group":
            tiny.SMALL[name] = 4
    tiny.EXPERTS = EXPERTS
    model = tiny.lively(tiny.tiny_model(family))
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim >= 2:
            noise = torch.randn(weight.shape, generator=generator)
            weight.data = 0.7 * weight + 0.7 * weight.std() * noise
    return model.float()


def documents_of(seed):
    """Text of a Markov chain over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(tiny.VOCABULARY, tiny.VOCABULARY, generator=generator) ** 6
    rows[:, :3] = 0
    ids = torch.randint(3, tiny.VOCABULARY, (DOCUMENTS, 1), generator=generator)
    for _ in range(LENGTH - 1):
        ids = torch.cat((ids, torch.multinomial(rows[ids[:, -1]], 1, generator=generator)), 1)
    return list(ids)


def second_run(model, documents, precision):
    """What B records in a precision."""
    if precision == "bf16":
        other = copy.deepcopy(model)
        cast(other, torch.bfloat16)
        return trace_model(ModelSide(other), documents)
    name = precision.removesuffix("-emulated")
    return trace_model(ModelSide(model, None if name == "fp32" else name), documents)


def judged(half, section, name, family, precision, seed):
    """What `diff` says of a pair, from traces and with the model."""
    slot, change, _ = CASES[half][section][name]
    model, documents = model_of(family, seed), documents_of(seed)
    generator = torch.Generator().manual_seed(seed)
    changes = dict(zip(slot.split("+"), change if "+" in slot else (change,), strict=True))
    if "both" in changes:
        changes["both"](model, generator)
    a = trace_model(ModelSide(model), documents)
    other = copy.deepcopy(model)
    if "weights" in changes:
        changes["weights"](other, generator)
    if "scores" in changes:
        edit = changes["scores"]
        edit = edit(precision) if isinstance(edit, partial) else edit
        with RouterScores(other, seed, lambda scores: edit(scores, generator)) as routers:
            b = second_run(other, documents, precision)
        assert routers.changed, "no router was found"
    else:
        b = second_run(other, documents, precision)
    if "file" in changes:
        b = changes["file"](b, generator)
    a, b = (replace(x, provenance={}) for x in (a, b))
    expect, conclusions = precision.removesuffix("-emulated"), {}
    for mode, side, expected in (
        ("model", (model, Letters()), expect),
        ("traces", a, expect),
        ("unknown", a, None),
    ):
        try:
            result: Any = tl.diff(side, b, expect=expected)
            conclusions[mode] = {
                "conclusion": result.causes.conclusion,
                "alarm": result.causes.alarm,
                "patterns": [x.kind for x in result.causes.patterns],
                "flips": [layer.flip.count for layer in result.layers],
            }
        except Exception as error:  # whatever diff raises is an outcome
            conclusions[mode] = {"error": f"{type(error).__name__}: {error}"}
    return conclusions


def listed(half, seed):
    """All pairs of a half in random order."""
    cases = [
        (section, name, family, precision, 1000 * seed + 10 * number + index)
        for section, group in CASES[half].items()
        for number, (name, (_, _, precisions)) in enumerate(group.items())
        for index, family in enumerate(FAMILIES[half])
        for precision in precisions
        if section == "sound" or (index + number + len(precision)) % 2 == 0
    ]
    random.Random(seed).shuffle(cases)  # noqa: S311
    return cases


def show(lines):
    """Print alarms by section, case and mode."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for line in lines:
        for mode, verdict in line["found"].items():
            what = "error" if "error" in verdict else "alarm" if verdict["alarm"] else "quiet"
            counts[line["section"], line["name"], mode, what] += 1
            if "exchanged scores" in verdict.get("patterns", ()):
                counts[line["section"], line["name"], mode, "exchanged"] += 1
    for section, name, mode in sorted({key[:3] for key in counts}):
        row = [counts[section, name, mode, x] for x in ("alarm", "exchanged", "quiet", "error")]
        print(section, "|", name, "|", mode, "| alarm, of them exchanged, quiet, error:", row)


def main():
    """Run a half, one line of JSON per pair."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("half", choices=CASES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", default="24:00")
    parser.add_argument("--sections", nargs="+", default=["sound", "faulty"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()
    lines = []
    with options.out.open("w") as file:
        for section, name, family, precision, seed in listed(options.half, options.seed):
            if section not in options.sections:
                continue
            if time.strftime("%H:%M") >= options.until:
                break
            try:
                conclusions = judged(options.half, section, name, family, precision, seed)
            except RuntimeError as error:  # a family that does not run in this precision
                print(family, precision, "not made:", error)
                continue
            facts = {"section": section, "name": name, "family": family, "precision": precision}
            lines.append(facts | {"found": conclusions})
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
    show(lines)


if __name__ == "__main__":
    main()
