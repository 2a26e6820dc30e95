r"""Remedies side by side: what each leaves of a perturbation, how far it moves the model, its cost.

    to the original   KL(P ‖ Q), P the original in float32, Q the repaired model, perturbed
    two runs          KL(Q ‖ Q'), Q' a second run of the repaired model under the perturbation
    moved             KL(P ‖ P'), P' the repaired model in float32

    nothing           the model as it is
    float32           routers kept in float32: all of them, or the list of the audit
    replay            Q takes the experts that P chose, and Q' those that Q chose: with live
                      weights, or with the weights that were recorded
    smooth            projected top-k, ε = c σ with σ the noise of each layer's gap
    ramp              paper 1's ramp with as many experts per token as the middle one of those

Q and Q' are two draws of a noise. A rounding has nothing to draw. Its second run has noise on the
states that it rounds, of the size of the format's own errors, ρ = rms(round(x) - x) for normal x:
other kernels and batches change the last digits that a format holds, and nothing else.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.perturbations import Perturbation, applied, noise_generator
from tieline.analysis.precision_records import KeepList, Remedy, RemedyEffect, RemedyTable
from tieline.analysis.precision_runs import model_logits
from tieline.analysis.smooth_width import NOISE, Calibration
from tieline.core.errors import TielineError, require
from tieline.core.statistics import Estimate, SequenceSums, kl_divergence
from tieline.models.capture import capture
from tieline.models.emulate import format_named, modular_routers
from tieline.models.families import family_of
from tieline.models.kernel import KERNEL
from tieline.models.loading import can_use_experts, use_experts
from tieline.models.replay import replay
from tieline.models.running import forward
from tieline.models.smooth import smooth_, unsmooth_
from tieline.models.smooth_router import GateName
from tieline.run.processes import Ranks
from tieline.trace.record import RoutingTrace

SCALES = (4.0, 16.0, 64.0)
"""c = ε/σ of the smoothed forms."""

USUAL = ("router bf16", "model bf16", "model int8")
"""Perturbations that remedies are tried on unless others are named."""

ROUNDS, TIMED_ROWS = 3, 2
"""How often each form is timed, and on how many sequences."""

UNMOVED = Estimate(0.0, 0.0)

Ids = Int[Tensor, "rows length"]
Logits = Float[Tensor, "rows length words"]
Weights = Literal["live", "recorded"]


def chosen_perturbations(
    run: Sequence[Perturbation], names: Sequence[str] | None
) -> list[Perturbation]:
    """The perturbations of an audit that remedies are tried on.

    Args:
        run: all of the audit.
        names: which; ("all",) for all, () for none, None for the usual ones or else all roundings.
    """
    known = {one.name: one for one in run}
    if names is None:
        usual = [known[name] for name in USUAL if name in known]
        return usual or [one for one in run if one.kind == "rounding"]
    if tuple(names) == ("all",):
        return list(run)
    unknown = [name for name in names if name not in known]
    require(
        not unknown,
        f"remedies are tried on perturbations of the audit: {', '.join(unknown)} is none of "
        f"{', '.join(known)}, all, none",
    )
    return [known[name] for name in names]


@cache
def rounding_noise(level: str) -> float:
    """ρ = rms(round(x) - x) of normal numbers x, in the activations of a format, or its weights."""
    number_format = format_named(level)
    grid = number_format.activations or number_format.weights
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    return (grid(x) - x).double().square().mean().sqrt().item()


@contextmanager
def second_run(
    model: nn.Module, one: Perturbation, source: torch.Generator, keep: Sequence[str] = ()
) -> Iterator[None]:
    """A block in which the model is perturbed otherwise than by `applied` with another source.

    Args:
        model: the model.
        one: what to do.
        source: where noise comes from; not that of the first run.
        keep: routers that rounding spares, and that see no noise of it.
    """
    noise = None  # made before the format is emulated, which would round its size
    if one.kind == "rounding":
        noise = Perturbation("state noise", rounding_noise(str(one.level)), one.part)
    with ExitStack() as stack:
        stack.enter_context(applied(model, one, source, keep))
        if noise is not None:
            if one.part == "model":
                stack.enter_context(applied(model, noise, source))
            else:
                for name, router in modular_routers(model).items():
                    if name not in keep:
                        stack.enter_context(applied(router, noise, source))
        yield


class _Form(NamedTuple):
    """A way to smooth the model."""

    name: str
    gate: GateName
    widths: dict[str, float]
    experts: float
    slots: int | None

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """A block in which the model is smoothed so."""
        smooth_(model, epsilon=self.widths, gate=self.gate, k_max=self.slots)
        try:
            yield
        finally:
            unsmooth_(model)


def smoothed_forms(model: nn.Module, calibration: Ids) -> list[_Form]:
    """Projected top-k of three widths, and the ramp with as many experts as the middle one."""
    known = Calibration(model, [calibration], NOISE)
    forms = []
    for scale in SCALES:
        widths = known.by_noise(scale)
        experts = known.experts(widths, "projected")
        forms.append(_Form(f"smoothed, ε = {scale:g} σ", "projected", widths, experts, None))
    budget, experts = forms[1].experts, min(plan.n_experts for plan in known.plans)
    if budget > max(plan.k for plan in known.plans):
        widths = known.by_budget(budget, "ramp")
        forms.append(_Form("paper 1's ramp", "ramp", widths, budget, experts))
    return forms


@dataclass
class _Sums:
    """What is counted of one remedy under one perturbation."""

    to_original: SequenceSums = field(default_factory=SequenceSums)
    two_runs: SequenceSums = field(default_factory=SequenceSums)

    def add(self, original: Logits, first: Logits, second: Logits) -> None:
        """Count a batch: the clean original, and two perturbed runs of the repaired model."""
        self.to_original.add(kl_divergence(original, first))
        self.two_runs.add(kl_divergence(first, second))


REPLAYS: dict[str, Weights] = {
    "replay of experts": "live",
    "replay, weights too": "recorded",
}
NOTHING, ALL_ROUTERS, LISTED = "nothing", "float32 routers", "float32 routers, listed"


class RemedyRuns:
    """Tries remedies on batches of text, one after the other.

    Args:
        model: in evaluation mode, in float32.
        perturbations: what to repair, with the place of each in the audit.
        keeps: routers to keep in float32, by name of the perturbation.
        costs: bytes that all routers take more in float32, by name of the perturbation.
        calibration: tokens that the noise σ and the number of experts are taken from.
        seed: seed of all noise.
        number: place of the first batch among those of all processes.
    """

    def __init__(
        self,
        model: nn.Module,
        perturbations: Mapping[Perturbation, int],
        keeps: Mapping[str, KeepList],
        costs: Mapping[str, int],
        calibration: Ids,
        seed: int,
        number: int = 0,
    ) -> None:
        self._model, self._perturbations, self._seed = model, perturbations, seed
        self._keeps, self._costs = keeps, costs
        self._impossible: list[str] = []
        self._forms = self._allowed("smoothing", lambda: smoothed_forms(model, calibration)) or []
        self._routes = self._allowed("replay", lambda: self._replay_bytes(calibration)) or {}
        self._sums: dict[tuple[str, str], _Sums] = defaultdict(_Sums)
        self._moved = {form.name: SequenceSums() for form in self._forms}
        self._tokens, self._number = 0, number
        self._times = self._timed(calibration[:TIMED_ROWS])

    def _allowed(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` returns; None, and the reason noted, if this model does not allow it."""
        try:
            return make()
        except TielineError as problem:
            self._impossible.append(f"{what}: {problem}")
            return None

    def _replay_bytes(self, ids: Ids) -> dict[str, int]:
        """Bytes per token by kind of replay, after a try of each."""
        _, trace = self._recorded(ids[:1])
        sizes = {"live": 0, "recorded": 0}
        for layer in trace.layers:
            number = 1 if layer.facts.n_experts <= 256 else 2
            sizes["live"] += layer.facts.k * number
            sizes["recorded"] += layer.facts.k * (number + 4)
        for weights in REPLAYS.values():
            self._replayed(ids[:1], trace, weights)
        return sizes

    def batch(self, ids: Ids) -> None:
        """Try every remedy on a batch of tokens."""
        original, trace = self._recorded(ids)
        for one in self._perturbations:
            self._as_it_is(one, ids, original, trace)
            if one.kind == "rounding":
                self._kept(one, ids, original)
        for form in self._forms:
            with form.applied(self._model):
                clean = self._logits(ids)
                self._moved[form.name].add(kl_divergence(original, clean))
                for one in self._perturbations:
                    self._sums[form.name, one.name].add(original, *self._pair(one, ids))
        self._tokens, self._number = self._tokens + ids.numel(), self._number + 1

    def _as_it_is(self, one: Perturbation, ids: Ids, original: Logits, trace: RoutingTrace) -> None:
        """Nothing done; then the routes of the original, and of the first run, replayed."""
        with self._first(one):
            first, routes = self._recorded(ids)
        with second_run(self._model, one, self._source(one, 1)):
            second = self._logits(ids)
        self._sums[NOTHING, one.name].add(original, first, second)
        for name, weights in REPLAYS.items() if self._routes else ():
            with self._first(one):
                followed = self._replayed(ids, trace, weights)
            with second_run(self._model, one, self._source(one, 1)):
                again = self._replayed(ids, routes, weights)
            sums = self._sums[name, one.name]
            sums.to_original.add(kl_divergence(original, followed))
            sums.two_runs.add(kl_divergence(first, again))

    def _kept(self, one: Perturbation, ids: Ids, original: Logits) -> None:
        """All routers in float32, and those of the list if it leaves some out."""
        routers = tuple(modular_routers(self._model))
        if one.part == "router":  # nothing is rounded at all
            self._sums[ALL_ROUTERS, one.name].add(original, original, original)
        else:
            self._sums[ALL_ROUTERS, one.name].add(original, *self._pair(one, ids, routers))
        listed = self._keeps[one.name].layers if one.name in self._keeps else ()
        if 0 < len(listed) < len(routers):
            self._sums[LISTED, one.name].add(original, *self._pair(one, ids, listed))

    def _pair(self, one: Perturbation, ids: Ids, keep: Sequence[str] = ()) -> tuple[Logits, Logits]:
        """Logits of two perturbed runs."""
        with self._first(one, keep):
            first = self._logits(ids)
        with second_run(self._model, one, self._source(one, 1), keep):
            return first, self._logits(ids)

    def _first(self, one: Perturbation, keep: Sequence[str] = ()) -> AbstractContextManager[None]:
        return applied(self._model, one, self._source(one), keep)

    def _source(self, one: Perturbation, *run: int) -> torch.Generator:
        return noise_generator(self._seed, self._perturbations[one], self._number, *run)

    def _logits(self, ids: Ids) -> Logits:
        return model_logits(forward(self._model, ids), ids)

    def _recorded(self, ids: Ids) -> tuple[Logits, RoutingTrace]:
        """Logits and routes of a run."""
        with capture(self._model, distances=False, epsilons=()) as recorder:
            logits = self._logits(ids)
        return logits, recorder.trace()

    def _replayed(self, ids: Ids, trace: RoutingTrace, weights: Weights) -> Logits:
        with replay(self._model, trace, weights):
            return self._logits(ids)

    def _timed(self, ids: Ids) -> dict[str, float]:
        """Median time of a forward pass over the original's, by remedy, all in turns."""
        before = getattr(getattr(self._model, "config", None), "_experts_implementation", None)
        if can_use_experts(self._model):
            with suppress(TielineError):  # experts of a layout that the kernel refuses
                use_experts(self._model, KERNEL)
                self._logits(ids)
        try:
            return self._in_turns(ids)
        finally:
            use_experts(self._model, before if can_use_experts(self._model) else None)

    def _in_turns(self, ids: Ids) -> dict[str, float]:
        forms: dict[str, Callable[[], AbstractContextManager[Any]]] = {NOTHING: nullcontext}
        if self._routes:
            _, trace = self._recorded(ids)
            for name, weights in REPLAYS.items():
                forms[name] = partial(replay, self._model, trace, weights)
        forms |= {form.name: partial(form.applied, self._model) for form in self._forms}
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(1 + ROUNDS):
            for name, form in forms.items():
                with form():
                    start = time.process_time()
                    self._logits(ids)
                    seconds[name].append(time.process_time() - start)
        middle = {name: statistics.median(spent[1:]) for name, spent in seconds.items()}
        return {name: value / max(middle[NOTHING], 1e-9) for name, value in middle.items()}

    def join(self, share: Ranks) -> None:
        """Make what was counted that of all processes."""
        sums = [one for both in self._sums.values() for one in (both.to_original, both.two_runs)]
        share.join_sums([*sums, *self._moved.values()])
        counted = share.join_rows({"tokens": torch.tensor([self._tokens])})
        self._tokens = int(counted["tokens"].sum())

    def table(self) -> RemedyTable:
        """What was counted so far."""
        k = _mean_k(self._model)
        plain = [Remedy(NOTHING, "nothing", UNMOVED, k, 1.0, 0, {}, self._effects(NOTHING))]
        for name in (ALL_ROUTERS, LISTED):
            plain.append(Remedy(name, "float32", UNMOVED, k, None, 0, {}, self._effects(name)))
        for name, weights in REPLAYS.items():
            size, spent = self._routes.get(weights, 0), self._times.get(name)
            plain.append(Remedy(name, "replay", UNMOVED, k, spent, size, {}, self._effects(name)))
        for form in self._forms:
            kind = "smooth" if form.gate == "projected" else "ramp"
            moved, spent = self._moved[form.name].mean(), self._times.get(form.name)
            found = self._effects(form.name)
            widths = form.widths
            plain.append(Remedy(form.name, kind, moved, form.experts, spent, 0, widths, found))
        return RemedyTable(
            tuple(one for one in plain if one.effects),
            tuple(one.name for one in self._perturbations),
            self._tokens,
            NOISE,
            tuple(self._impossible),
        )

    def _effects(self, remedy: str) -> tuple[RemedyEffect, ...]:
        found = []
        for name in (one.name for one in self._perturbations):
            sums = self._sums.get((remedy, name))
            if sums is not None:
                both = sums.to_original.mean(), sums.two_runs.mean()
                found.append(RemedyEffect(name, *both, self._bytes(remedy, name)))
        return tuple(found)

    def _bytes(self, remedy: str, perturbation: str) -> int:
        if remedy == ALL_ROUTERS:
            return self._costs.get(perturbation, 0)
        return self._keeps[perturbation].bytes if remedy == LISTED else 0


def _mean_k(model: nn.Module) -> float:
    counts = []
    for router in modular_routers(model).values():
        family = family_of(router)
        assert family is not None
        counts.append(int(attrgetter(family.k)(router)))
    return sum(counts) / len(counts)
