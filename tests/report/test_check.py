"""The page and the lines of a check, and text that tries to break out of them."""

from dataclasses import replace

import numpy as np
import pytest

import tieline as tl
from tieline import report
from tieline.analysis.check import RouteCheck
from tieline.core.errors import TraceError
from tieline.report.words.check import checks_sentences


def random_choices():
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(9)[:3] for _ in range(400)]).reshape(100, 4, 3)


def broken(name="a<script>alert(1)</script>.npy"):
    ids = random_choices()
    ids[50:60] = 0
    result = tl.check(ids)
    file = replace(result.files[0], name=name, said=("a<b",))
    return replace(result, files=(file,))


def test_page_and_lines_tell_the_verdict_and_escape_names():
    result = broken()
    page = report.page(result)
    assert "<script>alert" not in page
    assert "A&lt;b" in page
    assert "Unsound: 2 findings" in page
    assert "all-zero" in report.summary(result)
    assert "all-zero" in report.notebook(result)
    assert report.figures(result) == {}
    assert report.terminal(result, 80) is not None


def test_a_file_without_findings_says_so():
    page = tl.check(random_choices()).to_html()
    assert "Nothing was found." in page
    assert "No problems found." in page


def test_what_was_checked_and_what_was_not_is_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = tl.check(random_choices())
    checked, unchecked = checks_sentences(result)
    assert checked.startswith("Checked: ids in range")
    assert "--ids FILE" in unchecked
    assert "--model MODEL" in unchecked
    assert checked in result.to_html()
    assert "<code>--ids FILE</code>" in result.to_html()
    tokens = np.arange(100)
    (checked, unchecked) = checks_sentences(tl.check(random_choices(), tokens=tokens))
    assert "against the token ids" in checked
    assert "--ids" not in unchecked
    np.save("routes.npy", random_choices())
    (checked,) = checks_sentences(tl.check(random_choices(), tokens=tokens, against="routes.npy"))
    assert "against routes.npy" in checked
    assert checks_sentences(tl.check(np.zeros((40, 2, 2), int))) == []


@pytest.mark.parametrize("change", [{"case": "x"}, {"evidence": {}}])
def test_the_page_of_a_damaged_result_is_refused(change):
    result = tl.check(np.full((40, 2, 2), 3)).to_dict()
    result["findings"][0] |= change
    values = {name: value for name, value in result.items() if name not in ("format", "version")}
    with pytest.raises(TraceError):
        RouteCheck.from_dict(values).to_html()


def test_a_result_without_files_is_refused():
    result = tl.check(random_choices()).to_dict()
    values = {name: value for name, value in result.items() if name not in ("format", "version")}
    with pytest.raises(TraceError, match="at least one file"):
        RouteCheck.from_dict(values | {"files": []})
