"""tieline upcycle from end to end."""

import json

import pytest
from transformers.utils import logging

from tests.models.dense import dense_model
from tests.models.tiny import tiny_model
from tieline.models import find_routers, load_pretrained

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path):
    logging.disable_progress_bar()
    dense_model("llama").save_pretrained(tmp_path / "dense")
    return tmp_path


def test_a_folder_becomes_a_folder_that_loads(tieline, folder):
    arguments = ["upcycle", folder / "dense", "-o", folder / "out", "--n-experts", 4, "--k", 2]
    code, out, err = tieline(*arguments, "--layers", "0,2", "--json", folder / "a.json")
    assert code == 0, err
    assert "2 networks became mixtures of 4 experts, top-2" in out
    assert f"wrote {folder / 'out'}" in err
    result = json.loads((folder / "a.json").read_text())
    assert result["output_change"] < 1e-6
    assert result["layers"] == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert result["loss_before"] is None
    assert len(find_routers(load_pretrained(folder / "out"))) == 2
    assert not (folder / "out.part").exists()


BAD = [
    (["--k", 9], "--k 9 of 8 experts"),
    (["--layers", "0,7"], "no such layer: 7"),
    (["--copy-noise", "-1"], "--copy-noise must be"),
    (["--router-init", "ones"], "--router-init"),
    (["--text", "nowhere.txt"], "no such file: nowhere.txt"),
    (["--dtype", "int3"], "--dtype must be"),
    (["--json", "nowhere/a.json"], "nowhere"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_leaves_with_2_and_writes_nothing(tieline, folder, arguments, message):
    code, _, err = tieline("upcycle", folder / "dense", "-o", folder / "out", *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (folder / "out").exists()


def test_a_mixture_and_what_is_no_model_are_refused(tieline, folder):
    tiny_model("mixtral").save_pretrained(folder / "moe")
    for name, message in [
        (folder / "moe", "Mixture of Experts already"),
        (folder / "none" / "such" / "folder", "no such folder"),
    ]:
        code, _, err = tieline("upcycle", name, "-o", folder / "out")
        assert (code, message in err) == (2, True), err
        assert not (folder / "out").exists()


def test_what_is_there_is_not_replaced_without_being_asked_to(tieline, folder):
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")
    arguments = ["upcycle", folder / "dense", "-o", folder / "out"]
    for more, message in [([], "is not empty"), (["--overwrite"], "something else than a model")]:
        code, _, err = tieline(*arguments, *more)
        assert (code, message in err) == (2, True), err
    (folder / "out" / "config.json").write_text("{}")
    assert tieline(*arguments, "--overwrite")[0] == 0
    assert not (folder / "out" / "notes.txt").exists()


def test_the_model_itself_is_never_replaced(tieline, folder):
    (folder / "link").symlink_to(folder / "dense")
    for out in (folder / "dense", folder / "link"):
        code, _, err = tieline("upcycle", folder / "dense", "-o", out, "--overwrite")
        assert (code, "an output never replaces an input" in err) == (2, True), err
    assert load_pretrained(folder / "dense") is not None


def test_a_text_needs_a_tokenizer(tieline, folder):
    (folder / "text.txt").write_text("Some words.")
    arguments = ["upcycle", folder / "dense", "-o", folder / "out", "--text", folder / "text.txt"]
    code, _, err = tieline(*arguments)
    assert code == 2
    assert "no tokenizer" in err
