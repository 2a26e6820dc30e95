"""The example of the documentation runs, on the real model."""

import json
import subprocess
import sys

import pytest

from tests.shared import shared_data

STORIES, with_stories = shared_data("stories260K")
SHAKESPEARE, with_shakespeare = shared_data("tinyshakespeare")


@pytest.mark.slow
@with_stories
@with_shakespeare
def test_the_mixture_starts_at_the_loss_of_the_dense_model_and_learns():
    files = [STORIES / "stories260K.bin", STORIES / "tok512.bin", SHAKESPEARE / "input.txt"]
    words = [sys.executable, "examples/upcycle_stories.py", *map(str, files), "--steps", "20"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    told = json.loads(ended.stdout)
    assert told["loss of the mixture"] == pytest.approx(told["loss of the dense model"], abs=1e-4)
    assert told["mixture after 20 steps"] < told["loss of the mixture"] - 0.3
    assert told["experts apart"] > 0
