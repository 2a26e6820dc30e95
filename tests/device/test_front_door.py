"""The jobs of the front door on an accelerator: the numbers of the CPU, and clear refusals."""

import pytest
import torch

import tieline as tl
from tieline.core.errors import TielineError
from tieline.models.emulate import _normal_noise

SMALL = {"tokens": 192, "sequence_length": 64}


def numbers(result):
    """The finite metrics of a result."""
    return {name: value for name, value in result.metrics.items() if isinstance(value, float)}


def assert_same(there, here):
    ours, theirs = numbers(there), numbers(here)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_inspect_on_the_device(fake):
    assert_same(tl.inspect("demo", **SMALL, device=fake), tl.inspect("demo", **SMALL))


@pytest.mark.slow
def test_diff_on_the_device(fake):
    options = {**SMALL, "dtype_b": "bf16-emulated"}
    there = tl.diff("demo", "demo", **options, device=fake)
    assert_same(there, tl.diff("demo", "demo", **options))


@pytest.mark.slow
def test_audit_on_the_device(fake):
    options = {**SMALL, "formats": ["bf16"]}
    assert_same(tl.audit("demo", **options, device=fake), tl.audit("demo", **options))


@pytest.mark.slow
def test_smooth_on_the_device(fake):
    assert_same(tl.smooth("demo", **SMALL, device=fake), tl.smooth("demo", **SMALL))


def test_noise_on_the_device_has_the_numbers_of_the_cpu(fake):
    like = torch.ones(3, 4, device="cpu")
    here = _normal_noise(like, torch.Generator().manual_seed(3))
    there = _normal_noise(like.to(fake), torch.Generator().manual_seed(3))
    assert there.device.type == fake
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("device", ["cuda:1", "tpu", "mps", "fake:7"])
def test_a_device_that_is_not_there_is_refused_in_one_line(fake, device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    if device == "cuda:1" and torch.cuda.device_count() > 1:
        pytest.skip("this machine has one")
    with pytest.raises(TielineError, match=r"^device '.*' cannot be used: .{8,200}$") as problem:
        tl.inspect("demo", **SMALL, device=device)
    assert "\n" not in str(problem.value)
