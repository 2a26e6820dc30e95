#!/usr/bin/env python3
"""Hand mutants of Tieline that its test suite kills, and a runner that proves it.

    python mutants.py --root CHECKOUT --python PYTHON [--only ID ...] [--tests-map FILE.json]

A mutant is a snippet of source that occurs exactly once below ROOT/src/tieline and is found by its
content, wherever it was moved to. It is replaced, the tests run, and the file is restored, whatever
happens. What a mutant can come to:

    killed       a test failed (exit code 1 of pytest) that passes without the mutant
    survived     all tests passed
    not found    the snippet is nowhere
    ambiguous    the snippet is in more than one place
    baseline     the tests do not pass without the mutant
    no tests     none of the test files was found
    broken       pytest ended otherwise (code 2 to 5), such as by an error of collection
    timeout      the tests took too long

The exit code is 0 if all are killed, else 1. Stand-alone: standard library only.

FILE.json maps a test path of `MUTANTS` to a path below ROOT or a list of them: they run instead of
a file that is gone, and after one that is still there. A file that is gone and not in the map is
looked for by its name anywhere below ROOT/tests, preferring one in a folder of the same name.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """One change; `tests` kill it together or alone, and run in this order until one does."""

    id: str
    room: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str


def _m(id: str, old: str, new: str, tests: str, reason: str) -> Mutant:
    """A mutant whose room is the part of its id before the dash; `tests` are divided by spaces."""
    test_paths = tuple(f"tests/{path}" for path in tests.split())
    return Mutant(id, id.partition("-")[0], old, new, test_paths, reason)


MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------ base
    _m(
        "base-1",
        "return above | (level & (level.cumsum(dim=-1) <= vacant))",
        "return above | (level & (level.cumsum(dim=-1) < vacant))",
        "core/ranking/test_ranking.py",
        "off by one: of tied scores one too few is chosen",
    ),
    _m(
        "base-2",
        "displaced = (scores.gather(1, chosen) < values[:, k - 1 : k]).any(dim=-1)",
        "displaced = (scores.gather(1, chosen) < values[:, k - 1 : k]).all(dim=-1)",
        "core/ranking/test_choice.py",
        "a single displaced expert is overlooked",
    ),
    _m(
        "base-4",
        "low, high = low * (counts > 0), high * (counts < n) + (counts == n)",
        "low, high = low * (counts > 0), high * (counts < n)",
        "core/statistics/test_bands.py",
        "upper end of the binomial band is 0 where all were seen",
    ),
    # --------------------------------------------------------------- routing
    _m(
        "routing-1",
        "ramp = rise / (rise + (1 - x) ** b)",
        "ramp = rise / (rise + (1 - x) ** a)",
        "routing/smooth_gates/test_smooth_topk.py",
        "swapped exponent: right for a = b only",
    ),
    _m(
        "routing-2",
        "room = threshold - kth_largest(selection, k_max + 1)",
        "room = threshold - kth_largest(selection, k_max)",
        "routing/smooth_gates/test_smooth_topk.py routing/test_gates.py",
        "off by one in the rank that narrows the band",
    ),
    _m(
        "routing-3",
        "return epsilon * ((local.assigned.sum() - budget * local.tokens) / tokens).to(epsilon)",
        "return epsilon * ((local.assigned.sum() - budget * tokens) / tokens).to(epsilon)",
        "routing/test_losses.py",
        "wrong only where a batch is spread over processes",
    ),
    _m(
        "routing-4",
        "seated = (requested.cumsum(dim=0) <= capacity) & (requested == 1)",
        "seated = (requested.cumsum(dim=0) < capacity) & (requested == 1)",
        "routing/test_baselines.py",
        "off by one: an expert holds one token less than its capacity",
    ),
    _m(
        "routing-5",
        "torch.mm(rows.grad.T, hidden.mul_(gate), out=grad_w_out)",
        "torch.mm(rows.grad.T, hidden, out=grad_w_out)",
        "routing/dispatch/test_dispatch.py",
        "gradient of the output map without the gate weight",
    ),
    # ----------------------------------------------------------------- trace
    _m(
        "trace-1",
        "return high + (low >> LOW_BITS), low & ((1 << LOW_BITS) - 1)",
        "return high, low & ((1 << LOW_BITS) - 1)",
        "trace/counts/test_moments.py",
        "the carry of the exact sum is dropped",
    ),
    _m(
        "trace-2",
        "return self.counts.cumsum(0)[1:-2:2]",
        "return self.counts.cumsum(0)[2:-1:2]",
        "trace/counts/test_grid.py",
        "below counts the values at the grid point too",
    ),
    _m(
        "trace-3",
        "first = torch.from_numpy(order[np.concatenate(([True], ~repeated))])",
        "first = torch.from_numpy(order[np.concatenate((~repeated, [True]))])",
        "trace/summary/test_sample.py",
        "of a repeated token the largest record wins, not the smallest",
    ),
    _m(
        "trace-4",
        "start = int(numbers.max()) + 1",
        "start = int(numbers.max())",
        "trace/test_selection.py",
        "off by one: the last document of a part and the first of the next share a number",
    ),
    _m(
        "trace-5",
        "np.multiply(near[row] - above.astype(np.int64) - 1, gap < epsilon, out=orders[row])",
        "np.multiply(near[row] - above.astype(np.int64) - 1, gap <= epsilon, out=orders[row])",
        "trace/summary/test_chunk.py",
        "a gap of exactly epsilon counts as a tie",
    ),
    _m(
        "trace-7",
        "return self if same else SharedBias(None, changed=True)",
        "return self",
        "trace/summary/test_summary.py",
        "a bias that changed between batches goes unnoticed",
    ),
    # -------------------------------------------------------------- geometry
    _m(
        "geometry-1",
        "proved = best.values * distances.max() <= excluded_rise",
        "proved = best.values * distances.mean() <= excluded_rise",
        "measure/distance/test_distance.py",
        "the few ranks are taken for proved too early",
    ),
    _m(
        "geometry-2",
        "first, last = max(0, k - order), min(k - 1, experts - 1 - order)",
        "first, last = max(0, k - order), min(k, experts - 1 - order)",
        "lab/geometry/masses/test_masses.py",
        "off by one: a window of ranks that does not hold k",
    ),
    _m(
        "geometry-3",
        "log_ways -= math.lgamma((dim - codim) / 2 + 1)",
        "log_ways -= math.lgamma((dim - codim + 1) / 2)",
        "lab/geometry/tubes/test_tubes.py",
        "wrong volume of the ball in the leading term",
    ),
    _m(
        "geometry-4",
        "along = (r2 - r1 * cosine) / math.sin(angle)",
        "along = (r2 + r1 * cosine) / math.sin(angle)",
        "lab/geometry/exit_time/test_exit_time.py",
        "sign of the angle between two faces",
    ),
    _m(
        "geometry-5",
        "inside = (below[2] - below[1]) - (below[1] - below[0])",
        "inside = (below[2] - below[1]) + (below[1] - below[0])",
        "measure/rounding_flips/test_product.py",
        "sign: unflips count as flips",
    ),
    _m(
        "geometry-6",
        "error = math.sqrt((8 * f_w + f_2w) / tokens) / (2 * width)",
        "error = math.sqrt((16 * f_w + f_2w) / tokens) / (2 * width)",
        "measure/boundary/test_density.py",
        "standard error without the covariance of the two masses",
    ),
    _m(
        "geometry-7",
        "relative = width**2 * (b**2 / s**4 - 1 / s**2) / 6",
        "relative = width**2 * (1 / s**2 - b**2 / s**4) / 6",
        "lab/geometry/tubes/test_slabs.py",
        "sign of the next order",
    ),
    # -------------------------------------------------------------- tropical
    _m(
        "tropical-1",
        "return min(comb(n_experts, k), zaslavsky(n_experts, dim + 1) - n_experts)",
        "return min(comb(n_experts, k), zaslavsky(n_experts, dim + 1))",
        "lab/tropical/capacity/test_capacity.py",
        "the bound on cells is still true but not sharp",
    ),
    _m(
        "tropical-2",
        "if max(k, rest) >= dim + 2:",
        "if max(k, rest) > dim + 2:",
        "lab/tropical/capacity/test_capacity.py",
        "boundary case of what no router attains",
    ),
    _m(
        "tropical-3",
        "return (2 * k - 1) * n - (k * k - 1) - int(k_sets(sites)[: k - 1].sum())",
        "return (2 * k - 1) * n - (k * k - 1) - int(k_sets(sites)[:k].sum())",
        "lab/tropical/cells/test_voronoi.py",
        "off by one in the sum of k-sets",
    ),
    _m(
        "tropical-4",
        "order = np.lexsort((-self.coefficients, *self.exponents.T[::-1]))",
        "order = np.lexsort((self.coefficients, *self.exponents.T[::-1]))",
        "lab/tropical/test_algebra.py",
        "of terms with equal exponents the smallest coefficient is kept",
    ),
    _m(
        "tropical-5",
        "law = (m - 1) * k * math.log(n * math.e / k) - (d_eff + 0.5) * math.log(m)",
        "law = (m - 1) * k * math.log(n * math.e / k) - (d_eff - 0.5) * math.log(m)",
        "lab/tropical/test_layer_shape_advice.py",
        "sign of the Stirling term of the paper's law",
    ),
    _m(
        "tropical-6",
        "terms = log_p[dim - 1 :: -2] if dim <= n_experts else log_p[n_experts - 1 :: -1]",
        "terms = log_p[dim - 1 :: -1] if dim <= n_experts else log_p[n_experts - 1 :: -1]",
        "lab/tropical/capacity/test_expectation.py",
        "all block sizes instead of every second one",
    ),
    _m(
        "tropical-7",
        "return torch.stack([first, other + (other >= first).long()], dim=1)",
        "return torch.stack([first, other + (other > first).long()], dim=1)",
        "lab/tropical/curve_pieces/test_crossings.py",
        "a token is paired with itself now and then",
    ),
    # ---------------------------------------------------------------- limits
    _m(
        "limits-1",
        "integrand = 2 * math.log(2) * residual * d - (math.log(2) + 0.5) * d.square()",
        "integrand = 2 * math.log(2) * residual * d - (2 * math.log(2)) * d.square()",
        "lab/limits/temperature_limit/test_slope.py",
        "constant of the sampled slope",
    ),
    _m(
        "limits-3",
        "hessian[0, 0] -= flat.gradient[:2] @ student.normal",
        "hessian[0, 0] += flat.gradient[:2] @ student.normal",
        "lab/limits/saddle/test_saddle.py",
        "sign of the curvature of the circle of normals",
    ),
    _m(
        "limits-4",
        "partition = mean_estimate(2.0 * misplaced.double())",
        "partition = mean_estimate(misplaced.double())",
        "lab/limits/recovery/test_recovery.py",
        "a point in the wrong cell counts in one difference only",
    ),
    _m(
        "limits-5",
        "distances = torch.minimum((best - best[-1]).norm(dim=1), (best + best[-1]).norm(dim=1))",
        "distances = (best - best[-1]).norm(dim=1)",
        "lab/limits/temperature_limit/test_gamma_limit.py",
        "a wall and its negative count as two",
    ),
    _m(
        "limits-6",
        "counts.index_put_((labels[sure], leader[sure]), counts.new_ones(()), accumulate=True)",
        "counts.index_put_((leader[sure], labels[sure]), counts.new_ones(()), accumulate=True)",
        "lab/limits/recovery/test_matching.py",
        "agreement transposed: the permutation is inverted",
    ),
    _m(
        "limits-7",
        "trace = target[(value < 0).long()]",
        "trace = target[(value > 0).long()]",
        "lab/limits/wall_integrals/test_shape.py",
        "the trace of the target from the other side of the wall",
    ),
    # ------------------------------------------------------------ estimation
    _m(
        "estimation-1",
        "rows[:, target] += rows[:, source]",
        "rows[:, target] += moments[:, source]",
        "lab/estimation/mixture_fit/test_dendrogram.py",
        "merging two experts forgets the moment of the second with itself",
    ),
    _m(
        "estimation-3",
        "return table[first, : x.shape[1]], table[first, x.shape[1] :], np.add.reduceat(mass, first)",
        "return table[first, : x.shape[1]], table[first, x.shape[1] :], mass[first]",
        "lab/estimation/regressor/test_standardise.py",
        "equal rows lose the weights of all but one",
    ),
    _m(
        "estimation-5",
        "return np.where(b < 0, sizes, np.inf)",
        "return sizes",
        "lab/test_power_law.py",
        "an error that does not fall gets a finite sample size",
    ),
    _m(
        "estimation-6",
        "flip = nearest(-fit.experts) < nearest(fit.experts)",
        "flip = nearest(-fit.experts) > nearest(fit.experts)",
        "lab/estimation/losses/test_quotient.py",
        "experts take the sign that is further from the truth",
    ),
    _m(
        "estimation-7",
        "mass_error = (cells.total(mass) - truth.bias.sigmoid()).abs()",
        "mass_error = (cells.total(mass) - truth.bias.exp()).abs()",
        "lab/estimation/losses/test_voronoi.py",
        "the mass of paper 2 in a loss of paper 4",
    ),
    _m(
        "estimation-8",
        "ended[(batch.refused >= KINK_STEPS) & (gain <= KINK**2)] = Status.KINK",
        "ended[batch.refused >= KINK_STEPS] = Status.KINK",
        "lab/estimation/solvers/test_levenberg.py",
        "refused steps far from a minimum count as an answer",
    ),
    # -------------------------------------------------------------------- hf
    _m(
        "hf-1",
        "return scores.masked_fill(excluded, limit.fill), values[:, -2] - values[:, -1]",
        "return scores.masked_fill(excluded, limit.fill), values[:, 0] - values[:, -1]",
        "models/test_router_rule.py models/capture/test_capture.py",
        "gap of the first instead of the last chosen group",
    ),
    _m(
        "hf-2",
        "_INT8 = Rounding(levels=127, scaled=True)",
        "_INT8 = Rounding(levels=128, scaled=True)",
        "models/number_formats/test_number_formats.py",
        "off by one: levels that the format does not have",
    ),
    _m(
        "hf-3",
        "return ended & (ids == self._padding)",
        "return ids == self._padding",
        "models/pass_tokens/test_batches.py",
        "a padding id inside a row that has not ended is dropped",
    ),
    _m(
        "hf-4",
        "return mass / mass.sum(dim=-1, keepdim=True).clamp(min=least)",
        "return mass / mass.sum(dim=-1, keepdim=True)",
        "models/test_router_rule.py models/smoothed_model/test_families.py",
        "the least sum that ernie4_5 divides by is dropped",
    ),
    _m(
        "hf-6",
        "parameters_per_token=parameters_before + routers + (k - 1) * per_expert,",
        "parameters_per_token=parameters_before + routers + k * per_expert,",
        "lab/on_model/test_upcycled_model.py lab/on_model/test_upcycle.py",
        "off by one: the dense network is counted with its copies",
    ),
    _m(
        "hf-7",
        "size = states.square().mean(dim=-1, keepdim=True).sqrt()",
        "size = states.square().mean().sqrt()",
        "models/emulate/test_noise_hooks.py",
        "noise relative to the batch and not to the token",
    ),
    _m(
        "hf-8",
        "padded = torch.nn.functional.pad(along, (0, -dim % size)).unflatten(-1, (-1, size))",
        "padded = torch.nn.functional.pad(along, (-dim % size, 0)).unflatten(-1, (-1, size))",
        "models/number_formats/test_number_formats.py",
        "groups counted from the wrong end of a width that they do not divide",
    ),
    # ----------------------------------------------------------------- audit
    _m(
        "audit-1",
        "return torch.maximum(\n        _margin_on_side(scores_a",
        "return torch.minimum(\n        _margin_on_side(scores_a",
        "analysis/score_noise/test_flip_tests.py analysis/diff/test_traces.py analysis/attribution/test_attribution.py",
        "the margin of a flip by the side whose scores say less",
    ),
    _m(
        "audit-2",
        "return highest - entering_scores.masked_fill(~entering, torch.inf).amin(1)",
        "return highest - entering_scores.masked_fill(~entering, -torch.inf).amax(1)",
        "analysis/diff/test_traces.py analysis/score_noise/test_flip_tests.py analysis/attribution/test_attribution.py",
        "the margin of a token by the wrong one of the experts that enter",
    ),
    _m(
        "audit-3",
        "spread = (y - ratio * x).square().sum().item() * groups / (groups - 1)",
        "spread = (y - ratio * x).square().sum().item()",
        "core/statistics/test_clusters.py",
        "clustered variance without the correction for few clusters",
    ),
    _m(
        "audit-4",
        "order = sorted(damages, key=lambda name: damages[name] / max(1, costs[name]), reverse=True)",
        "order = sorted(damages, key=lambda name: damages[name], reverse=True)",
        "analysis/remedies/test_keep_list.py",
        "routers are kept by damage, whatever they cost",
    ),
    _m(
        "audit-5",
        "weight = (len(finite) - len(near.gaps)) / max(1, len(random.gaps))",
        "weight = len(finite) / max(1, len(random.gaps))",
        "analysis/jumps/test_jump.py",
        "near tokens count twice in the shares",
    ),
    _m(
        "audit-6",
        "return ((column * tokens).sum() / tokens.sum()).item()",
        "return column.mean().item()",
        "analysis/monitor/test_monitor.py",
        "calls of different length count alike",
    ),
    _m(
        "audit-10",
        "follows = (trace.documents[next_tokens] == trace.documents[tokens]) & (next_tokens > tokens)",
        "follows = next_tokens > tokens",
        "analysis/jumps/test_loss.py",
        "tokens that end their document are swapped though nothing follows them",
    ),
    _m(
        "audit-12",
        "layers = tuple(replace(layer, inputs=None) for layer in trace.layers)",
        "layers = tuple(replace(layer) for layer in trace.layers)",
        "analysis/inspect/test_inspect.py",
        "the router inputs stay in the trace of an inspection",
    ),
    _m(
        "audit-13",
        "effect = max(1.0, error**2 / (share * (1 - share) / total))",
        "effect = error**2 / (share * (1 - share) / total)",
        "core/statistics/test_clusters.py",
        "dropped clamp: a design effect below 1 narrows the interval",
    ),
    # -------------------------------------------------------------- training
    _m(
        "training-1",
        "progress = (step - optim.warmup) / max(1, optim.steps - optim.warmup)",
        "done = step / max(1, optim.steps)",
        "lab/training/test_trainer.py",
        "the cosine is counted from the start and not from the warm-up",
    ),
    _m(
        "training-2",
        "if self.steps <= self.warmup:",
        "if self.steps < self.warmup:",
        "lab/training/test_gate_schedules.py",
        "off by one: the warm-up is a step short",
    ),
    _m(
        "training-3",
        "last = stream.numel() - context + 1",
        "last = stream.numel() - context",
        "lab/training/test_text_data.py",
        "off by one: the last window is never drawn",
    ),
    _m(
        "training-4",
        "pixels = pixels.flip(1)",
        "pixels = pixels.flip(0)",
        "lab/training/image_tasks/test_image_items.py",
        "wrong axis: images are turned upside down",
    ),
    _m(
        "training-6",
        "return self.move((weights != 0).double().mean().item() * self.n_experts)",
        "return self.move((weights != 0).double().median().item() * self.n_experts)",
        "lab/training/test_gate_schedules.py",
        "sparsity is driven by the median of zeros and ones and not by their mean",
    ),
    _m(
        "training-7",
        '"balanced_se": error.sqrt().item() / len(recall),',
        '"balanced_se": error.sqrt().item() / len(recall) ** 0.5,',
        "lab/training/image_tasks/test_image_items.py",
        "standard error of a mean of recalls",
    ),
    # --------------------------------------------------------------- studies
    _m(
        "studies-1",
        "shifts = (0.0,) if epsilon == 0 else (0.0, epsilon, -epsilon)",
        "shifts = (0.0,) if epsilon == 0 else (0.0, epsilon)",
        "lab/geometry/layer_continuity/test_line_events.py",
        "half of the ends of bands on a line are missed",
    ),
    _m(
        "studies-2",
        "passed = sharp and abs(measured - reference) <= tolerance",
        "passed = abs(measured - reference) <= tolerance",
        "lab/claims/test_evidence.py",
        "an estimate too vague to mean anything passes",
    ),
    _m(
        "studies-3",
        "pairs = [s for s in runs if s.seed in reference and gate != GATE_REFERENCE]",
        "pairs = [s for s in runs if s.seed in reference]",
        "lab/claims/gate_comparisons/test_gates.py",
        "the reference is compared with itself",
    ),
    # ---------------------------------------------------------- report, cli
    _m(
        "report-1",
        "if len(set(names)) < 2 or front + back >= shortest:",
        "if len(set(names)) < 2 or front + back > shortest:",
        "core/text/test_layer_names.py",
        "names that are all shared parts become empty",
    ),
    _m(
        "report-2",
        "math.log10(v) if v > 0 else floor for v in r",
        "math.log10(v) if v > 0 else None for v in r",
        "report/test_inspect_charts.py",
        "exact ties lose their colour",
    ),
    _m(
        "cli-1",
        "return list(range(first, last + 1))",
        "return list(range(first, last))",
        "core/test_setting_fields.py",
        "off by one: the last layer of a range is left out",
    ),
    _m(
        "cli-2",
        'if argument == "--json" and following != "-" and not following.endswith(".json"):',
        'if argument == "--json" and not following.endswith(".json"):',
        "cli/app/test_input.py",
        "--json - gets a second dash",
    ),
    # ------------------------------------------------------------------ run
    _m(
        "run-1",
        "return noise_generator(*self.seed, batch, *([self.draw] if self.draw else []))",
        "return noise_generator(*self.seed, batch)",
        "run/test_condition.py analysis/remedies/test_remedies.py",
        "a second run draws other noise than the first",
    ),
    _m(
        "run-2",
        "missing = [other for other in run.compared_with if other not in earlier]",
        "missing = []",
        "run/test_runner.py",
        "a reference comes before the passes that need it",
    ),
    _m(
        "run-3",
        "window = {*numbers[start : start + size]}",
        "window = {*numbers[start : start + size + 1]}",
        "run/test_runner.py run/test_law.py",
        "each batch is run in one window",
    ),
    _m(
        "run-4",
        "lost = torch.where(flipped, share, -1.0).cpu()",
        "lost = torch.where(flipped, share, 0.0).cpu()",
        "run/forward analysis/router_effects analysis/test_model_effects.py",
        "a token that keeps its experts lost nothing, which is not a flip",
    ),
    _m(
        "run-5",
        "torch.where(flipped[:, None], clean_choice.ids, choice.ids),",
        "choice.ids,",
        "run/test_schedule.py analysis/router_effects analysis/test_model_effects.py",
        "a forced pass takes the experts of its reference",
    ),
    _m(
        "run-6",
        "return dict(enumerate(self.batches, self.number))",
        "return dict(enumerate(self.batches))",
        "run/test_ranks.py run/test_law.py",
        "batches keep their numbers among those of all processes",
    ),
    # ------------------------------------------------------------------ analysis on the runner
    _m(
        "analysis-effects-1",
        "self.moved.add(moved.mean(dim=0).view(shape))",
        "self.moved.add(moved.amax(dim=0).view(shape))",
        "analysis/router_effects analysis/test_model_effects.py analysis/audit",
        "weight that moved is the mean over layers",
    ),
    _m(
        "analysis-effects-2",
        'for chosen in (condition, condition.taking("forced"))',
        "for chosen in (condition, condition)",
        "analysis/router_effects analysis/test_model_effects.py analysis/audit run/test_law.py",
        "the floor is measured with the clean choice",
    ),
    _m(
        "analysis-effects-3",
        "distributions or _distributions(x)",
        "_distributions(y)",
        "analysis/audit analysis/router_effects analysis/test_model_effects.py run/test_runner.py",
        "the KL is that of the clean predictions to the perturbed ones",
    ),
    # ------------------------------------------------------------------ words
    _m(
        "report-words-1",
        "limit = (LEAST_PERCENT_IN_SENTENCES if trim else LEAST_PERCENT) if least is None else least",
        "limit = (LEAST_PERCENT if trim else LEAST_PERCENT_IN_SENTENCES) if least is None else least",
        "report/words/test_numbers.py",
        "sentences state a coarser least percentage than tables",
    ),
    _m(
        "report-words-2",
        'return f"{math.ceil(number / scale - 1e-9) * scale:,}"',
        'return f"{math.floor(number / scale - 1e-9) * scale:,}"',
        "report/words/test_numbers.py report/words/test___init__.py report/test_inspect.py",
        "tokens that are needed are rounded upwards",
    ),
    _m(
        "report-words-3",
        'return names if unnamed <= 0 else f"{names} and {unnamed} more"',
        "return names",
        "report/words/test_numbers.py",
        "entries that are not named are counted",
    ),
    # ------------------------------------------------------------------ settings and plug-ins
    _m(
        "cli-settings-1",
        "return not typed if self.switches_off else self.setting_field.value(self.name, typed)",
        "return self.setting_field.value(self.name, typed)",
        "cli/test_options.py cli/commands/test_capture.py cli/commands/test_inspect.py",
        "--no-jumps switches jumps off",
    ),
    _m(
        "cli-settings-2",
        'return "" if value >= least else f"must be at least {least}"',
        'return "" if value > least else f"must be at least {least}"',
        "core/test_setting_fields.py cli/test_options.py",
        "the least value is allowed",
    ),
    _m(
        "cli-plugins-1",
        'loaded = {"tieline": INSTRUMENT}',
        "loaded = {}",
        "core/plugins/test_plugins.py",
        "the instrument is the first plug-in",
    ),
    # ---------------------------------------------------------------- device
    _m(
        "device-1",
        "columns = torch.arange(experts, device=used.device).expand(tokens, experts)",
        "columns = torch.arange(experts).expand(tokens, experts)",
        "device/test_budgets.py",
        "the experts of a token are numbered on the CPU",
    ),
    _m(
        "device-2",
        "numbers = torch.arange(tokens * most, device=used.device)",
        "numbers = torch.arange(tokens * most)",
        "device/test_budgets.py",
        "rows are numbered on the CPU",
    ),
    _m(
        "device-3",
        "counts = key.new_zeros(n_experts + 1).scatter_add_(",
        "counts = torch.zeros(n_experts + 1, dtype=key.dtype).scatter_add_(",
        "device/test_budgets.py",
        "the rows of experts are counted on the CPU",
    ),
    _m(
        "device-4",
        "offsets = counts[:-1].cumsum(0).to(torch.int32)",
        "offsets = torch.tensor(counts[:-1].cumsum(0).tolist(), dtype=torch.int32, device=key.device)",
        "device/test_budgets.py",
        "the offsets go through the CPU",
    ),
    _m(
        "device-5",
        "kept = torch.where(used, rows, 0)",
        "kept = rows",
        "device/test_budgets.py",
        "padding reaches the sum of a token",
    ),
    _m(
        "device-6",
        "return torch.where(self.used, weights.flatten().index_select(0, flat).unsqueeze(1), 0)",
        "return weights.flatten().index_select(0, flat).unsqueeze(1).nan_to_num(weights.sum().item())",
        "device/test_budgets.py",
        "the gate of a row is read back",
    ),
    _m(
        "device-7",
        "tokens = torch.full((), used.shape[0], dtype=torch.float64, device=weights.device)",
        "tokens = torch.tensor(used.shape[0], dtype=torch.float64, device=weights.device)",
        "device/test_budgets.py",
        "a loss copies the number of tokens to the device",
    ),
    _m(
        "device-8",
        "return self.fixed_epsilon if self.theta is None else self.epsilon.to(selection)",
        "return self.epsilon.to(selection)",
        "device/test_budgets.py",
        "a fixed width of the band is copied to the device at every call",
    ),
    _m(
        "device-9",
        "width = torch.full((), epsilon, dtype=selection.dtype, device=selection.device)",
        "width = torch.tensor(epsilon, dtype=selection.dtype, device=selection.device)",
        "device/test_budgets.py",
        "the projection copies its width to the device",
    ),
    _m(
        "device-10",
        'if selection.device.type != "cpu" or torch.compiler.is_compiling():',
        "if torch.compiler.is_compiling():",
        "device/test_budgets.py",
        "the projection reads back which rows share seats",
    ),
    _m(
        "device-11",
        "    if can_group(x, w_in, w_out):\n        hidden = ACTIVATIONS",
        "    if False:\n        hidden = ACTIVATIONS",
        "device/test_budgets.py",
        "experts run one by one on the device",
    ),
    _m(
        "device-12",
        'bound = {"most": self.gate.most_active} if isinstance(self.experts, Experts) else {}',
        "bound = {}",
        "device/test_budgets.py",
        "the layer does not tell how many experts a token can have",
    ),
    _m(
        "device-13",
        "requested = torch.zeros(len(choices), experts, dtype=torch.int64, device=scores.device)",
        "requested = torch.zeros(len(choices), experts, dtype=torch.int64)",
        "device/test_budgets.py",
        "the requests of a capacity are counted on the CPU",
    ),
    _m(
        "device-14",
        'if scores.device.type != "cpu":  # which rows they are is not read back',
        "if scores.numel() < 0:",
        "device/test_budgets.py",
        "ranking reads back which rows tie",
    ),
    _m(
        "device-15",
        'if scores.device.type != "cpu":  # reading back which tokens are unproved would synchronise',
        "if scores.numel() < 0:",
        "device/test_budgets.py",
        "distances read back which tokens are left",
    ),
    _m(
        "device-16",
        'if experts.device.type == "cpu" and torch.equal(experts, routed.ids):',
        "if torch.equal(experts, routed.ids):",
        "device/test_budgets.py",
        "capture compares experts on the host in every layer",
    ),
    _m(
        "device-17",
        'if checks is not None and wrong.device.type != "cpu":',
        'if checks is not None and wrong.device.type == "meta":',
        "device/test_budgets.py",
        "every check of a captured layer is read at once",
    ),
    _m(
        "device-18",
        "    for wrong, (_, refuse) in zip(copies, noted, strict=False):\n        refuse_if(wrong, refuse)\n",
        "",
        "device/test_budgets.py",
        "the noted checks of a pass are never made",
    ),
    _m(
        "device-19",
        "layers = tuple(layers_on_cpu(tuple(records.values()), checks))",
        "layers = tuple(records.values())",
        "device/test_budgets.py",
        "a captured trace stays on the device",
    ),
    _m(
        "device-20",
        "changed, replayed = torch.stack([differ.sum(), has.sum()]).tolist()",
        "changed, replayed = int(differ.sum()), int(has.sum())",
        "device/test_budgets.py",
        "replay reads two numbers per layer",
    ),
    _m(
        "device-21",
        "counts = torch.empty(len(scores), len(epsilons), dtype=torch.int32, device=scores.device)",
        "counts = torch.empty(len(scores), len(epsilons), dtype=torch.int32)",
        "device/test_budgets.py",
        "K(ε) is counted into a tensor of the CPU",
    ),
    _m(
        "device-22",
        "return torch.randn(like.shape, generator=generator, device=generator.device).to(like)",
        "return torch.randn(like.shape, generator=generator, device=like.device).to(like)",
        "device/test_front_door.py",
        "a generator of the CPU draws on the device",
    ),
    _m(
        "device-23",
        "first = (torch.arange(k_max, device=share.device) < k).to(share)",
        "first = (torch.arange(k_max) < k).to(share.dtype)",
        "device/test_front_door.py",
        "the columns of a smoothed router are numbered on the CPU",
    ),
]


# ------------------------------------------------------------------------------------------ runner

OUTCOMES = {0: "survived", 1: "killed"}


class Result(NamedTuple):
    """What a mutant came to: `where` is its file, `by` the test that failed or what went wrong."""

    status: str
    where: str
    by: str = ""


class Runner:
    """Applies mutants to one checkout."""

    def __init__(self, root: Path, python: str, tests_map: dict, timeout: float) -> None:
        self.root, self.python, self.tests_map, self.timeout = root, python, tests_map, timeout
        self._baselines: dict[str, str] = {}

    def run(self, mutant: Mutant) -> Result:
        """Apply, test, restore."""
        files = self.files(mutant)
        if len(files) != 1:
            where = ", ".join(files) or "-"
            return Result("ambiguous" if files else "not found", where)
        where = files[0]
        tests = [path for name in mutant.tests for path in self.located(name)]
        tests = list(dict.fromkeys(tests))
        if not tests:
            return Result("no tests", where, " ".join(mutant.tests))
        for test in tests:
            problem = self.baseline(test)
            if problem:
                return Result("baseline", where, f"{test}: {problem}")
        return self._tested(mutant, where, tests)

    def files(self, mutant: Mutant) -> list[str]:
        """A file for each occurrence of the snippet."""
        paths = []
        for path in sorted((self.root / "src" / "tieline").rglob("*.py")):
            count = path.read_bytes().count(mutant.old.encode())
            paths += [str(path.relative_to(self.root))] * count
        return paths

    def located(self, name: str) -> list[str]:
        """Where a test file is now."""
        kept = [name] if (self.root / name).exists() else []
        if name in self.tests_map:
            given = self.tests_map[name]
            given = [given] if isinstance(given, str) else list(given)
            return kept + [p for p in given if (self.root / p.partition("::")[0]).exists()]
        if kept:
            return kept
        wanted = Path(name)
        same = sorted((self.root / "tests").rglob(wanted.name))
        near = [path for path in same if path.parent.name == wanted.parent.name]
        return [str(path.relative_to(self.root)) for path in near or same]

    def baseline(self, test: str) -> str:
        """Why the tests of a file do not pass without a mutant; empty if they do."""
        if test not in self._baselines:
            code, last = self._pytest(test)
            passed = code == 0 and re.search(r"\b[1-9]\d* passed", last)
            self._baselines[test] = "" if passed else f"code {code}, {last or 'no output'}"
        return self._baselines[test]

    def _tested(self, mutant: Mutant, where: str, tests: list[str]) -> Result:
        path = self.root / where
        before, stat = path.read_bytes(), path.stat()
        try:
            path.write_bytes(before.replace(mutant.old.encode(), mutant.new.encode()))
            for test in tests:
                code, by = self._pytest(test)
                if code is None:
                    return Result("timeout", where, test)
                if code != 0:
                    return Result(OUTCOMES.get(code, "broken"), where, by)
            return Result("survived", where, " ".join(tests))
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def _pytest(self, test: str) -> tuple[int | None, str]:
        """Exit code of pytest (None: too slow) and the failed test, else the last line."""
        command = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
        variables = {"PYTHONPATH": str(self.root / "src"), "OMP_NUM_THREADS": "1"}
        # no byte code of a mutant is left behind
        environment = os.environ | variables | {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=self.timeout)[0]
        except subprocess.TimeoutExpired:
            return None, ""
        finally:  # also on Ctrl-C: the tests and what they started are ours
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = output.strip().splitlines() or [""]
        failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
        return process.returncode, failed[0] if failed else lines[-1]


def main() -> int:
    """Run the mutants that were asked for; 0 if all were killed."""
    about = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    about.add_argument("--root", type=Path, required=True, help="the checkout")
    about.add_argument("--python", default=sys.executable, help="the interpreter of the tests")
    about.add_argument("--only", nargs="+", metavar="ID", help="these mutants alone")
    about.add_argument("--tests-map", type=Path, help="JSON: old test path to new path or paths")
    about.add_argument("--timeout", type=float, default=300, help="seconds of a test file")
    about.add_argument("--locate", action="store_true", help="find snippets and tests, run nothing")
    given = about.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # restores the file on the way out
    ids = [mutant.id for mutant in MUTANTS]
    assert len(set(ids)) == len(ids), "an id occurs twice"
    unknown = set(given.only or ()) - set(ids)
    if unknown:
        about.error(f"unknown mutants: {', '.join(sorted(unknown))}")
    root = given.root.resolve()
    if not (root / "src" / "tieline").is_dir():
        about.error(f"{root}: no src/tieline here")
    tests_map = json.loads(given.tests_map.read_text()) if given.tests_map else {}
    runner = Runner(root, given.python, tests_map, given.timeout)
    chosen = [mutant for mutant in MUTANTS if not given.only or mutant.id in given.only]
    start, statuses = time.monotonic(), []
    for mutant in chosen:
        before = time.monotonic()
        result = _located(runner, mutant) if given.locate else runner.run(mutant)
        statuses.append(result.status)
        seconds = time.monotonic() - before
        line = f"{mutant.id:14} {result.where:45} {result.status:10} {seconds:6.1f} s  {result.by}"
        print(line.rstrip(), flush=True)
    wanted = "found" if given.locate else "killed"
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys([wanted, *statuses]))
    print(f"{len(chosen)} mutants: {counts}; {time.monotonic() - start:.0f} s")
    return 0 if chosen and all(status == wanted for status in statuses) else 1


def _located(runner: Runner, mutant: Mutant) -> Result:
    files = runner.files(mutant)
    tests = [path for name in mutant.tests for path in runner.located(name)]
    status = "not found" if not files else "ambiguous" if len(files) > 1 else "found"
    status = "no tests" if status == "found" and not tests else status
    return Result(status, ", ".join(files) or "-", " ".join(tests))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
