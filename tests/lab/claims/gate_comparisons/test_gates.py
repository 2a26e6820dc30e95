"""The table of gates: paired changes and intervals by hand, and from real runs."""

import math

import pytest

from tests.lab.training.tiny import tiny
from tieline.core.errors import TielineError
from tieline.lab.claims.gate_comparisons import GateScore, gate_table, read_scores
from tieline.lab.training.training_run import run_training


def score(gate, seed, perplexity, **rest):
    fields = {"bpc": 1.0, "word_perplexity": None, "attacked": None, "experts": 2.0}
    fields |= {"budget": None, "tokens": 10}
    return GateScore(gate=gate, seed=seed, perplexity=perplexity, **(fields | rest))


def test_changes_are_paired_by_seed():
    table = gate_table(
        [
            score("smoe", 0, 10.0),
            score("smoe", 1, 20.0),
            score("top3", 1, 21.0, experts=3.0),
            score("top3", 0, 11.0, experts=3.0),
            score("top3", 7, 99.0, experts=3.0),
        ]
    )
    smoe, top3 = table.rows
    assert (smoe.perplexity, smoe.change, smoe.low) == (15.0, None, None)
    assert smoe.deviation == pytest.approx(math.sqrt(50))
    assert top3.change == pytest.approx(7.5)  # of +10 % and +5 %, not of the run without a pair
    half = 12.7062 * 2.5 * math.sqrt(2) / math.sqrt(2)
    assert (top3.low, top3.high) == pytest.approx((7.5 - half, 7.5 + half), rel=1e-4)
    assert top3.seeds == (1, 0, 7)
    assert top3.experts == 3


def test_the_attack_is_the_rise_of_the_word_perplexity():
    table = gate_table(
        [
            score("smoe", 0, 5.0, word_perplexity=100.0, attacked=120.0),
            score("smoe", 1, 5.0, word_perplexity=200.0, attacked=220.0),
        ]
    )
    assert table.rows[0].attack == pytest.approx(15.0)


def test_finished_runs_are_read_in_the_order_of_the_gates(tmp_path):
    for gate in ("smooth1", "smoe"):
        run_training(tiny(gate, steps=2), tmp_path / f"demo-smoke-{gate}-0")
    (tmp_path / "demo-smoke-top3-0").mkdir()  # not finished
    scores = read_scores(tmp_path, "demo-smoke")
    assert [s.gate for s in scores] == ["smoe", "smooth1"]
    assert scores[0].tokens == 2 * 4 * 32
    assert (scores[0].budget, scores[1].budget) == (None, 2.5)
    assert gate_table(scores).to_dict()["rows"][1]["gate"] == "smooth1"
    with pytest.raises(TielineError, match="no finished run"):
        read_scores(tmp_path, "enwik8-small")
