"""Outputs that somebody else makes while a command works are left alone."""

import subprocess
import sys

import numpy as np
import pytest

from tests.cli.outputs.test_full_disk import FEW
from tests.models.dense import dense_model
from tests.trace.zoo import make_trace
from tieline.core import files
from tieline.models.demo import DEMO_FOLDER
from tieline.trace import save_trace


@pytest.fixture(scope="module")
def inputs_folder(tmp_path_factory):
    """A dense model, two traces and a file of routes."""
    folder = tmp_path_factory.mktemp("made")
    dense_model("llama").save_pretrained(folder / "dense")
    for seed in (0, 1):
        save_trace(make_trace(seed, tokens=40), folder / f"trace{seed}")
    np.save(folder / "routes.npy", np.arange(240).reshape(40, 3, 2) % 8)
    return folder


@pytest.fixture
def out(tmp_path, monkeypatch):
    """An output that somebody makes just before ours is written: a file, or a folder with one."""
    path, remove_leftovers = tmp_path / "out.x", files.remove_leftovers

    def thesis_first(target):
        if target.name == path.name and not path.exists():
            make_thesis(path)
        remove_leftovers(target)

    monkeypatch.setattr(files, "remove_leftovers", thesis_first)
    return path


def make_thesis(path):
    path.mkdir()
    (path / "thesis").write_text("mine")


FOLDERS = {
    "inspect": ["inspect", "--tokens", 64, "--save-trace", "@"],
    "capture": ["capture", "--tokens", 64, "--engine", "transformers", "-o", "@"],
    "merge": ["merge", "+/trace0", "+/trace1", "--renumber", "-o", "@"],
    "convert": ["convert", "+/trace0", "@", "--to", "trace"],
    "smooth": ["smooth", *FEW, "-o", "@"],
    "reroute": ["reroute", "--tokens", 128, "--fit-tokens", 128, "-o", "@"],
    "upcycle": ["upcycle", "+/dense", "-o", "@"],
}
FILES = {
    "json": ["design", "--preset", "olmoe", "--json=@"],
    "page": ["design", "--preset", "olmoe", "--html=@"],
    "converted": ["convert", "+/routes.npy", "@", "--to", "vllm"],
}


def spelled(arguments, out, inputs_folder):
    return [
        str(argument).replace("@", str(out)).replace("+", str(inputs_folder))
        for argument in arguments
    ]


@pytest.mark.parametrize("more", [[], ["--overwrite"]], ids=["new", "overwrite"])
@pytest.mark.parametrize("arguments", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_made_meanwhile_is_left_alone(tieline, out, inputs_folder, arguments, more):
    code, _, err = tieline(*spelled(arguments, out, inputs_folder), *more)
    assert (code, "another process wrote it meanwhile" in err) == (2, True), err
    assert "wrote " + str(out) not in err
    assert [path.name for path in out.iterdir()] == ["thesis"]
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("arguments", FILES.values(), ids=FILES)
def test_a_file_made_meanwhile_is_left_alone(tieline, out, inputs_folder, monkeypatch, arguments):
    monkeypatch.setitem(globals(), "make_thesis", lambda path: path.write_text("mine"))
    code, _, err = tieline(*spelled(arguments, out, inputs_folder))
    expected = f"error: {out} exists: another process wrote it meanwhile, and it is left alone"
    assert (code, expected in err) == (2, True), err
    assert "choose another name or add --overwrite" in err
    assert out.read_text() == "mine"
    assert list(out.parent.iterdir()) == [out]
    code, _, err = tieline(*spelled(arguments, out, inputs_folder), "--overwrite")
    assert code == 0, err
    assert out.read_text() != "mine"


def test_one_of_two_runs_into_one_folder_says_that_it_wrote(tmp_path, inputs_folder):
    command = [
        sys.executable,
        "-m",
        "tieline",
        *spelled(FOLDERS["merge"], tmp_path / "out", inputs_folder),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runs = [subprocess.Popen(command, **pipes) for _ in range(2)]
    texts = [" ".join(run.communicate(timeout=300)[0].split()) for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2], texts
    assert sum(f"{tmp_path / 'out'}: 80 tokens" in text for text in texts) == 1, texts
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "arguments", [FOLDERS["upcycle"], FOLDERS["merge"]], ids=["model", "trace"]
)
def test_files_that_are_written_are_as_readable_as_their_siblings(
    tieline, tmp_path, inputs_folder, arguments
):
    code, _, err = tieline(*spelled(arguments, tmp_path / "out", inputs_folder))
    assert code == 0, err
    (tmp_path / "sibling").touch()
    mode = (tmp_path / "sibling").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {mode}


@pytest.mark.parametrize(
    "arguments", [["inspect", "--tokens", 64], ["design", "--preset", "olmoe"]]
)
def test_the_model_in_the_box_is_never_an_output(tieline, arguments):
    config = DEMO_FOLDER / "config.json"
    before = config.read_bytes()
    code, _, err = tieline(*arguments, "--json", config)
    assert (code, "an output never replaces" in err) == (2, True), err
    assert config.read_bytes() == before
