"""The table of left-out domains from planted scores, and real runs at a tiny size."""

import math
from dataclasses import replace

import pytest

from tests.lab.training.image_tasks.test_task_images import TINY, domains
from tieline.core.errors import TielineError
from tieline.lab.claims import gate_comparisons as study
from tieline.lab.claims.gate_comparisons import DomainScore, domain_table, leave_one_out
from tieline.lab.training import image_tasks as task_images
from tieline.lab.training.recipes import pacs_small

SCORE = DomainScore("cosine", "photo", 0, 0.5, 0.4, 0.01, 0.6, 0.3, 1 / 7, 2.0)


def scores():
    planted = {
        ("cosine", "photo"): (0.40, 0.50),
        ("cosine", "sketch"): (0.20, 0.30),
        ("perturbed", "photo"): (0.44, 0.52),
        ("perturbed", "sketch"): (0.22, 0.28),
    }
    return [
        replace(SCORE, gate=gate, out=out, seed=seed, accuracy=value)
        for (gate, out), values in planted.items()
        for seed, value in enumerate(values)
    ]


def test_means_deviations_and_paired_gains():
    table = domain_table(scores())
    cosine, perturbed = table.rows
    assert cosine.domains == {"photo": pytest.approx(0.45), "sketch": pytest.approx(0.25)}
    assert cosine.deviations["photo"] == pytest.approx(0.1 / math.sqrt(2))
    assert cosine.average == pytest.approx(0.35)
    assert cosine.deviation == pytest.approx(0.1 / math.sqrt(2))  # averages .30 and .40
    assert (cosine.gain, cosine.gain_se) == (0.0, 0.0)
    assert perturbed.gain == pytest.approx(0.015)  # .03 and 0 at the two seeds
    assert perturbed.gain_se == pytest.approx(0.015)
    assert perturbed.balanced == {"photo": pytest.approx(0.4), "sketch": pytest.approx(0.4)}
    assert table.seeds == (0, 1)
    assert table.at_chance == ()
    assert table.to_dict()["rows"][1]["gate"] == "perturbed"


def test_a_run_at_chance_is_named():
    runs = scores()
    runs[3] = replace(runs[3], balanced=0.16, balanced_se=0.01)
    assert domain_table(runs).at_chance == (("cosine", "sketch", 1),)
    assert replace(SCORE, balanced=1 / 7 + 0.031).above_chance
    assert not replace(SCORE, balanced=1 / 7 + 0.029).above_chance


def test_an_incomplete_table_is_refused_and_one_seed_has_no_deviation():
    with pytest.raises(TielineError, match="7 runs of 2 × 2 × 2"):
        domain_table(scores()[1:])
    single_seed = [score for score in scores() if score.seed == 0]
    assert math.isnan(domain_table(single_seed).rows[0].deviation)


def test_runs_are_made_once_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(task_images, "load_pacs", lambda *_, **__: domains())
    small = {"model": TINY, "optim__steps": 2, "optim__batch": 8}
    monkeypatch.setattr(study, "pacs_small", lambda g, o: pacs_small(g, o).replace(**small))
    progress_calls = []
    chosen = {"gates": ("cosine",), "domains": ("photo", "sketch"), "seeds": (0,)}
    first = leave_one_out(
        tmp_path, progress=lambda *arguments: progress_calls.append(arguments), **chosen
    )
    assert [(s.gate, s.out, s.seed) for s in first] == [("cosine", d, 0) for d in chosen["domains"]]
    assert progress_calls == [("runs", 0, 2), ("runs", 1, 2)]
    monkeypatch.setattr(task_images, "load_pacs", None)  # nothing is trained a second time
    assert leave_one_out(tmp_path, **chosen) == first
    assert domain_table(first).rows[0].experts == 2.0
