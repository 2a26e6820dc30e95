"""The direction of a difference on images: what decides it, leaves it open, or is an error."""

from dataclasses import replace

import pytest

from tests.lab.claims.gate_comparisons.test_domains import SCORE
from tests.lab.training.image_tasks.test_task_images import TINY, domains
from tieline.lab.claims import gate_comparisons
from tieline.lab.claims.claim import ClaimRun, Verdict, all_claims
from tieline.lab.claims.gate_comparisons import (
    IMAGE_PAIRS,
    NO_DATA,
    NOT_TRAINED,
    accuracy_gains,
    higher_accuracy,
)
from tieline.lab.claims.ledger import run_claim
from tieline.lab.claims.paper1 import tables
from tieline.lab.training import image_tasks as task_images
from tieline.lab.training.image_data import PACS
from tieline.lab.training.recipes import pacs_small

FULL = ClaimRun(False, 0)
CLAIM = "p1-table3"
PAPER = {"smooth": 30.0, "cosine": 28.0, "soft": 25.0, "expert-choice": 27.0}


@pytest.fixture
def pacs_is_here(tmp_path, monkeypatch):
    """Create an empty PACS file; tests with planted averages do not read it."""
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    (tmp_path / PACS.name).parent.mkdir()
    (tmp_path / PACS.name).touch()


def plant(monkeypatch, averages, spread=0.1, balanced=0.3):
    """Averages of every gate in percent, with an odd one at every other seed."""

    def scores(gate, seed):
        average = averages[gate] + spread * (seed % 2) * (gate == "smooth")
        score = replace(SCORE, gate=gate, seed=seed, balanced=balanced)
        return tuple(replace(score, accuracy=(average + gap) / 100) for gap in (-6, 1, 2, 3))

    monkeypatch.setattr(gate_comparisons, "_domain_scores", scores)


def verdict():
    outcome = run_claim(all_claims()[CLAIM], FULL)
    assert not outcome.error, outcome.error
    return outcome.verdict


@pytest.mark.usefixtures("pacs_is_here", "no_axis_checks")
def test_intervals_decide_the_claim(monkeypatch):
    plant(monkeypatch, PAPER)
    assert verdict() is Verdict.HOLDS
    plant(monkeypatch, PAPER, spread=20.0)  # intervals across zero
    assert verdict() is Verdict.UNDECIDED
    plant(monkeypatch, PAPER | {"cosine": 30.0})  # one of three across zero
    assert verdict() is Verdict.UNDECIDED
    plant(monkeypatch, PAPER | {"soft": 31.0})  # one of three the other way
    assert verdict() is Verdict.FAILS


@pytest.mark.usefixtures("pacs_is_here", "no_axis_checks")
def test_gates_that_were_swapped_change_the_verdict(monkeypatch):
    plant(monkeypatch, PAPER)
    monkeypatch.setattr(
        tables, "higher_accuracy", lambda run, gate, other, gain: real(run, other, gate, gain)
    )
    real = higher_accuracy
    assert verdict() is Verdict.FAILS
    check = real(FULL, "smooth", "cosine", 0.56)
    assert (check.measured, check.passed) == (pytest.approx(2.05), True)
    assert check.low is not None
    assert check.low > 0


@pytest.mark.usefixtures("pacs_is_here", "no_axis_checks")
def test_models_at_chance_decide_nothing(monkeypatch):
    error = SCORE.balanced_se / 2  # of four domains
    plant(monkeypatch, PAPER, balanced=SCORE.chance + 2.9 * error)
    assert verdict() is Verdict.UNDECIDED
    check = higher_accuracy(FULL, "soft", "smooth", 1.74)  # the other way: no verdict either
    assert (check.passed, check.open) == (False, "8 of 8 averages are at chance")
    plant(monkeypatch, PAPER, balanced=SCORE.chance + 3.1 * error)
    assert verdict() is Verdict.HOLDS


@pytest.mark.usefixtures("pacs_is_here")
def test_pairs_have_the_same_seed_and_seeds_of_runs_differ(monkeypatch):
    monkeypatch.setattr(
        gate_comparisons, "_average_accuracy", lambda gate, seed: 10.0 * seed + (gate == "smooth")
    )
    assert accuracy_gains(ClaimRun(False, 2), "smooth", "soft") == [1.0] * IMAGE_PAIRS
    seeds = []
    monkeypatch.setattr(
        gate_comparisons, "_average_accuracy", lambda gate, seed: seeds.append(seed) or 1.0
    )
    accuracy_gains(ClaimRun(False, 0), "smooth", "soft")
    accuracy_gains(ClaimRun(False, 1), "smooth", "soft")
    assert sorted(set(seeds)) == list(range(2 * IMAGE_PAIRS))


def test_the_fast_mode_and_absent_data_leave_it_open(tmp_path, monkeypatch):
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    monkeypatch.setattr(gate_comparisons, "_domain_scores", None)  # nothing is trained
    for run, reason in ((ClaimRun(True, 0), NOT_TRAINED), (FULL, NO_DATA)):
        check = higher_accuracy(run, "smooth", "soft", 1.74)
        assert (check.open, check.passed, check.reference) == (reason, False, 1.74)
    outcome = run_claim(all_claims()[CLAIM], FULL)
    assert (outcome.verdict, outcome.error) == (Verdict.UNDECIDED, "")
    assert NO_DATA in outcome.reason


@pytest.mark.usefixtures("pacs_is_here")
def test_another_file_in_the_place_of_pacs_is_an_error_and_no_verdict():
    outcome = run_claim(all_claims()[CLAIM], FULL)
    assert outcome.verdict is None
    assert "DataError" in outcome.error


def test_an_average_is_trained_once_and_is_that_of_four_domains(monkeypatch):
    trained = []

    def small(gate, out):
        trained.append((gate, out))
        changes = {"model": TINY, "optim__batch": 8}
        return pacs_small(gate, out).replace(**changes)

    monkeypatch.setattr(task_images, "load_pacs", lambda *_, **__: domains())
    monkeypatch.setattr(gate_comparisons, "pacs_small", small)
    monkeypatch.setattr(gate_comparisons, "STEPS", 2)
    gate_comparisons._domain_scores.cache_clear()
    first = gate_comparisons._average_accuracy("soft", 0)
    assert gate_comparisons._average_accuracy("soft", 0) == first
    gate_comparisons._domain_scores.cache_clear()
    assert len(trained) == len({out for _, out in trained}) == 4
    assert (first / 100 * 40) % 1 == pytest.approx(0, abs=1e-9)  # ten images a domain
