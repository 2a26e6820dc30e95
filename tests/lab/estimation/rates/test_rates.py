"""Rate studies from end to end, small; the published laws at full size are marked slow."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tieline.lab.estimation.fit import FitWarning
from tieline.lab.estimation.identifiability import null_dimension
from tieline.lab.estimation.rate_plan import case_of, named_case
from tieline.lab.estimation.rates import RateStore, RateStudy, rate_study, study_seconds

TINY = {"gate": "linear", "expert": "linear", "d": 1, "n_experts": 2, "draws": 10}
GRID = {"sizes": (300, 1000, 3000), "repetitions": 8, "noise": 0.05}


@pytest.fixture(scope="module")
def tiny():
    return case_of(**TINY, **GRID, radii=(0.05,)).plan


@pytest.fixture(scope="module")
def study(tiny):
    return rate_study(tiny, executor="serial")


def test_losses_fall_like_the_root_of_n(study):
    assert study.failed == 0
    assert -0.75 < study.rate("quotient").slope < -0.3
    assert -0.65 < study.rate("function").slope < -0.35
    assert len(study.rows) == 24


def test_the_function_error_is_the_parametric_one(study, tiny):
    # E‖f - f*‖² = σ² p/n for p parameters that the data see
    losses = torch.stack(study.losses("function")).square().mean(-1)
    visible_parameters = tiny.model.n_parameters - null_dimension(tiny.model)
    expected = tiny.noise**2 * visible_parameters / torch.tensor(tiny.sizes)
    ratio = losses / expected
    assert ((ratio > 0.5) & (ratio < 2)).all()


def test_the_record_is_what_figure_and_table_need(study):
    assert [series.loss for series in study.series] == ["raw", "quotient", "function", "experts"]
    first = study.series[1]
    assert first.mean == pytest.approx([part.mean().item() for part in study.losses("quotient")])
    assert first.rate.slope == pytest.approx(study.rate("quotient").slope)
    assert sum(study.status.values()) == study.problems == 24
    assert study.well_specified


def test_the_sample_size_answers_the_question(study):
    estimate = study.samples_for(study.losses("quotient")[1].mean().item())
    assert 500 < estimate.n < 2000
    assert estimate.low < estimate.n < estimate.high


def test_results_are_taken_up_where_they_were_left(study, tiny, tmp_path):
    path = tmp_path / "rows.jsonl"
    store = RateStore(path)
    store.add(study.rows[:10])
    with path.open("ab") as file:
        file.write(b'{"study":"half')
    progress_calls = []
    again = rate_study(
        tiny, results=path, executor="serial", progress=lambda *part: progress_calls.append(part)
    )
    assert progress_calls[-1][0] == progress_calls[-1][1] == 8 * 4300
    assert len(store.load(tiny.key)) == 24
    for name in ("raw", "quotient", "function", "n", "radius", "repetition", "status"):
        assert [getattr(row, name) for row in again.rows] == pytest.approx(
            [getattr(row, name) for row in study.rows]
        )
    assert study_seconds(tiny, path) == 0
    assert [row.seconds for row in again.rows[:10]] == [r.seconds for r in study.rows[:10]]


KILLED = """
import os, signal, sys
from pathlib import Path
from tieline.lab.estimation import rate_plan
from tieline.lab.estimation.rate_plan import case_of
from tieline.lab.estimation.rates import rate_study
rate_plan.plan_blocks.__defaults__ = ((), 1)
case = case_of(gate="linear", expert="linear", d=1, n_experts=2, draws=10,
               sizes=(300, 1000, 3000), repetitions=8, noise=0.05, radii=(0.05,))
def stop(done, total):
    if done >= 5 * 3000:
        os.kill(os.getpid(), signal.SIGKILL)
rate_study(case.plan, results=Path(sys.argv[1]), executor="serial", progress=stop)
"""


def test_a_killed_study_goes_on(study, tiny, tmp_path):
    path = tmp_path / "rows.jsonl"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    assert len(RateStore(path).load(tiny.key)) == 5
    again = rate_study(tiny, results=path, executor="serial")
    assert [row.raw for row in again.rows] == pytest.approx([r.raw for r in study.rows])


def test_failures_are_told_once(tiny):
    plan = replace(tiny, method="sgd", sizes=(300,), radii=(1.0,))
    with pytest.warns(FitWarning, match="of 8 problems did not converge"):
        rate_study(plan, executor="serial")


def test_a_ridge_decides_below_the_number_of_parameters_and_not_at_it(tiny):
    assert tiny.model.n_parameters == 8
    study = RateStudy.from_rows(replace(tiny, sizes=(5, 7, 8, 300)), ())
    assert study.ridge.sizes == (5, 7)
    assert study.ridge.words.startswith("n = 5, 7: fewer samples than the 8 parameters")
    assert RateStudy.from_rows(tiny, ()).ridge.words == ""


def test_too_few_samples_are_told(tiny):
    plan = replace(tiny, sizes=(5, 300), repetitions=2)
    with pytest.warns(FitWarning) as warnings:
        rate_study(plan, executor="serial")
    assert any(
        "fewer samples than the 8 parameters" in str(warning.message) for warning in warnings
    )


def test_the_raw_loss_keeps_the_start_and_the_quotient_does_not():
    grid = {"sizes": (1000, 3000), "repetitions": 4, "radii": (0.03, 0.3)}
    case = case_of(gate="cosine", expert="tanh", d=2, n_experts=2, draws=20, **grid)
    study = rate_study(case.plan, executor="serial", quiet=True)
    means = {
        (loss, r): torch.stack(study.losses(loss, r)).median().item()
        for loss in ("raw", "quotient")
        for r in case.plan.radii
    }
    assert means["raw", 0.3] > 4 * means["raw", 0.03]
    assert means["quotient", 0.3] == pytest.approx(means["quotient", 0.03], rel=0.02)


def test_a_start_that_shrinks_makes_any_raw_loss_fall():
    grid = {"sizes": (1000, 16_000), "repetitions": 16, "radii": (0.1,), "shrink": True}
    case = case_of(gate="cosine", expert="tanh", d=2, n_experts=2, draws=20, **grid)
    study = rate_study(case.plan, executor="serial", quiet=True)
    assert study.rate("raw").slope < -0.35
    assert study.series[0].start == "r = 0.1 √(1000/n)"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("executor", ["loky", "dask"])
def test_processes_and_clusters_give_the_same_rows(study, tiny, executor):
    pytest.importorskip("joblib" if executor == "loky" else "distributed")
    again = rate_study(tiny, executor=executor, jobs=2)
    assert [row.raw for row in again.rows] == pytest.approx([r.raw for r in study.rows])


SMALL = [
    f"small-{gate}-{link}-tanh"
    for gate in ("linear", "cosine", "perturbed", "quadratic", "partial")
    for link in ("softmax", "sigmoid")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL, *(name.replace("tanh", "relu") for name in SMALL)])
def test_small_designs_obey_the_honest_laws(name):
    case = named_case(name, sizes=(1000, 3162, 10_000, 30_000), repetitions=16)
    study = rate_study(case.plan, executor="serial", quiet=True)
    assert study.failed == 0
    assert -0.62 <= study.rate("quotient").slope <= -0.40
    assert -0.56 <= study.rate("function").slope <= -0.46


@pytest.mark.slow
def test_the_raw_cosine_slope_flattens_with_the_radius_and_the_quotient_does_not():
    radii = (0.003, 0.01, 0.03, 0.1)
    case = named_case(
        "small-cosine-softmax-tanh", sizes=(1000, 3162, 10_000, 30_000), repetitions=16, radii=radii
    )
    study = rate_study(case.plan, executor="serial", quiet=True)
    raw = [study.rate("raw", r).slope for r in radii]
    assert raw == sorted(raw)
    assert raw[0] < raw[-1] - 0.1
    for r in radii:
        assert -0.62 <= study.rate("quotient", r).slope <= -0.40
