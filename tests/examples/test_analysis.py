"""The worked examples of the documentation, on few tokens."""

import pytest


@pytest.fixture
def run(example):
    def stdout(name):
        code, out, err = example(name, "1024")
        assert code == 0, err
        return out

    return stdout


def test_a_mismatch_of_trainer_and_engine_is_explained_and_engine_bugs_are_named(run):
    output = run("rl_mismatch")
    assert "A and B choose other experts in" in output
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert lines["sound"].endswith("[]")
    assert "tokens are shifted" in lines["late"]
    assert "experts are numbered differently in 1 of 4 layers" in lines["renumbered"]


def test_a_quantised_router_flips_more_the_coarser_its_format(run):
    rows = [line.split() for line in run("quantised_router").splitlines()[1:]]
    rates = {row[0]: float(row[1]) for row in rows}
    assert rates["bf16"] < rates["int8"] < rates["fp8_e4m3"] < rates["int4"]
