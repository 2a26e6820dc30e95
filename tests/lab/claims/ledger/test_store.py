"""Results on disk: whole, keyed, and refused where they cannot be kept."""

import json
from dataclasses import replace

import pytest

from tests.lab.claims.zoo import evidence, make_claim
from tieline.core.errors import TielineError
from tieline.core.records import to_plain
from tieline.lab.claims import ledger
from tieline.lab.claims.claim import ClaimOutcome, ClaimRun
from tieline.lab.claims.ledger import ResultStore, fingerprint

RUN = ClaimRun(True, 0)


@pytest.fixture
def stored_outcome(tmp_path):
    store, claim = ResultStore(tmp_path / "new" / "results"), make_claim()
    outcome = ClaimOutcome.of(claim, evidence(paper=[True]), RUN, 0.1)
    store.save(claim, RUN, outcome)
    return store, claim, outcome


def test_a_result_comes_back(stored_outcome):
    store, claim, outcome = stored_outcome
    assert to_plain(store.load(claim, RUN), nonfinite_as_text=True) == to_plain(
        outcome, nonfinite_as_text=True
    )
    assert [p.name for p in store.folder.iterdir()] == ["p0-test.fast.seed0.json"]


def test_another_mode_seed_claim_or_code_has_no_result(stored_outcome, monkeypatch):
    store, claim, _ = stored_outcome
    assert store.load(claim, ClaimRun(False, 0)) is None
    assert store.load(claim, ClaimRun(True, 1)) is None
    assert store.load(replace(claim, id="p0-other"), RUN) is None
    monkeypatch.setattr(ledger, "fingerprint", lambda: "changed")
    assert store.load(claim, RUN) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": 1, "version": 1}'])
def test_a_broken_file_counts_as_none(stored_outcome, text):
    store, claim, _ = stored_outcome
    (store.folder / "p0-test.fast.seed0.json").write_text(text)
    assert store.load(claim, RUN) is None


def test_a_save_that_is_cut_short_leaves_the_old_file(stored_outcome, monkeypatch):
    store, claim, outcome = stored_outcome

    def cut(self, target):
        raise OSError("no space left")

    monkeypatch.setattr(type(store.folder), "replace", cut)
    with pytest.raises(OSError, match="no space"):
        store.save(claim, RUN, replace(outcome, seconds=9.0))
    assert [p.name for p in store.folder.iterdir()] == ["p0-test.fast.seed0.json"]
    assert store.load(claim, RUN).seconds == 0.1


def test_a_place_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TielineError, match="no folder"):
        ResultStore(tmp_path / "file" / "results").check()
    ResultStore(tmp_path / "a" / "b").check()
    assert not (tmp_path / "a").exists()


def test_the_key_names_its_parts(stored_outcome):
    store, _, _ = stored_outcome
    record = json.loads((store.folder / "p0-test.fast.seed0.json").read_text())
    assert record["key"] == {"claim": "p0-test", "mode": "fast", "seed": 0, "code": fingerprint()}
    assert record["format"] == "tieline-claim"


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("measure/boundary.py", True),
        ("lab/claims/claim.py", True),
        ("lab/claims/paper1/ties.py", True),
        ("report/page.py", False),
        ("lab/report/ledger.py", False),
        ("cli/app.py", False),
    ],
)
def test_the_fingerprint_sees_what_computes_and_not_what_shows(tmp_path, source, changes):
    roots = [tmp_path / name for name in ("one", "other")]
    for root in roots:
        path = root / source
        path.parent.mkdir(parents=True)
        path.write_text(f"x = {root.name!r}\n")
    assert (fingerprint(roots[0]) != fingerprint(roots[1])) == changes
