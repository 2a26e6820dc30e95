"""The worked examples of the documentation, on few tokens."""

import pytest


@pytest.fixture
def run(example):
    def stdout(name, *arguments):
        code, out, err = example(name, *arguments)
        assert code == 0, err
        return out

    return stdout


def test_a_checkpoint_error_is_explained_and_repaired(run):
    output = run("checkpoint_error", "--tokens", "1024")
    assert "CheckpointError: torch.utils.checkpoint" in output
    assert "near-tie flip:" in output
    assert "in layer 'moe.gate'" in output
    assert "bf16:" in output
    assert output.endswith("4. With a fixed order of summation:\n   identical\n")


def test_a_kernel_test_knows_ties_from_bugs(run):
    output = run("kernel_test", "--tokens", "512")
    assert output.count("accepted:") == 2
    assert output.count("refused:") == 1
    assert "left out 63" in output
    assert output.endswith("without ties all ids agree, in order\n")


@pytest.mark.parametrize("name", ["cifar10_continuity", "pacs_domains"])
def test_examples_without_what_they_need_say_how_they_are_called(example, name):
    code, _, err = example(name)
    assert code == 2
    assert f"usage: {name}.py" in err
