"""The jobs of the front door on an accelerator: the numbers of the CPU, and clear refusals."""

import pytest
import torch

import tieline as tl
from tests.device.pretended import full_above
from tieline.core.errors import TielineError
from tieline.models.emulate import _normal_noise
from tieline.models.smoothed_model import smooth_
from tieline.run.smaller_batches import BatchSizeWarning

SMALL = {"tokens": 192, "sequence_length": 64}


def numbers(result):
    """The finite metrics of a result."""
    return {name: value for name, value in result.metrics.items() if isinstance(value, float)}


def assert_same(there, here):
    ours, theirs = numbers(there), numbers(here)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        # other products flip other tokens: of 192, two more or fewer
        assert ours[name] == pytest.approx(value, rel=0.02, abs=2.1 / 192), name


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


WEIGHTS = 1 << 20  # bytes of the largest weights of the demo model


def test_a_full_device_halves_the_batches_until_they_fit(fake):
    options = {"tokens": 2048, "sequence_length": 128, "device": fake, "jumps": False}
    with pytest.warns(BatchSizeWarning) as warned, full_above(WEIGHTS):
        there = tl.inspect("demo", **options, batch_size=16)
    tried = [int(str(w.message).split()[4]) for w in warned]
    assert tried == [16, 8, 4][: len(tried)]
    fits = tried[-1] // 2
    assert numbers(there) == numbers(tl.inspect("demo", **options, batch_size=fits))


def test_a_device_too_full_for_one_sequence_is_told_in_one_line(fake):
    line = r"^out of memory with 1 sequences per forward pass: shorten .{20,200}$"
    with (
        pytest.warns(BatchSizeWarning),
        pytest.raises(TielineError, match=line),
        full_above(WEIGHTS // 8),
    ):
        tl.inspect("demo", tokens=128, sequence_length=64, batch_size=2, device=fake)


def test_noise_on_the_device_has_the_numbers_of_the_cpu(fake):
    like = torch.ones(3, 4, device="cpu")
    here = _normal_noise(like, torch.Generator().manual_seed(3))
    there = _normal_noise(like.to(fake), torch.Generator().manual_seed(3))
    assert there.device.type == fake
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("device", ["cuda:1", "tpu", "mps", "fake:7", "meta", ""])
def test_a_device_that_is_not_there_is_refused_in_one_line(fake, device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    if device == "cuda:1" and torch.cuda.device_count() > 1:
        pytest.skip("this machine has one")
    with pytest.raises(TielineError, match=r"^device '.*' cannot be used: .{8,200}$") as problem:
        tl.inspect("demo", **SMALL, device=device)
    assert "\n" not in str(problem.value)


def test_a_smoothed_model_on_the_device_computes_what_it_does_on_the_cpu(fake):
    ids, outputs = torch.arange(3, 51, device="cpu").view(2, 24), []
    for device in ("cpu", fake):
        model = tl.Model.open("demo").module.to(device).eval()
        smooth_(model, epsilon=0.3, gate="ramp")
        with torch.no_grad():
            outputs.append(model(input_ids=ids.to(device)).logits.cpu())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
