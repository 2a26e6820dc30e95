"""The jobs of the front door on an accelerator: the numbers of the CPU, and clear refusals."""

import pytest
import torch
from accelerate import dispatch_model

import tieline as tl
from tests.device.pretended import full_above
from tieline.core.errors import TielineError
from tieline.models.emulate import _normal_noise
from tieline.models.smoothed_model import smooth_
from tieline.run.batch_size import BatchSizeWarning

SMALL = {"tokens": 192, "sequence_length": 64}


def numbers(result):
    """The finite metrics of a result, times apart."""
    metrics = result.metrics.items()
    return {name: x for name, x in metrics if isinstance(x, float) and not name.startswith("time")}


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
    options = {"tokens": 192, "calibration": 256, "rounds": 2}
    assert_same(tl.smooth("demo", **options, device=fake), tl.smooth("demo", **options))


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


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build of torch has CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_a_build_without_the_device_is_named_whatever_its_number(fake, device):
    line = f"^device '{device}' cannot be used: Torch not compiled with CUDA enabled$"
    with pytest.raises(TielineError, match=line):
        tl.Model.open("demo", device=device)


def test_the_default_device_of_torch_does_not_matter(fake):
    """As under `torch.set_default_device("cuda")`: records are of the CPU whatever it is."""
    model, ids = tl.Model.open("demo").module.to(fake).eval(), torch.arange(3, 51).view(2, 24)
    here = tl.inspect("demo", **SMALL, jumps=False)
    with torch.device(fake), torch.no_grad():
        with tl.capture(model) as recorder, tl.RoutingMonitor(model, every=1) as monitor:
            model(input_ids=ids.to(fake))
            monitor.step()
        trace = recorder.trace()
        with tl.replay(model, trace) as replayed:
            model(input_ids=ids.to(fake))
        there = tl.inspect("demo", **SMALL, jumps=False)
    assert replayed.changed == dict.fromkeys(replayed.changed, 0)
    assert {x.device.type for layer in trace.layers for x in layer.tensors().values()} == {"cpu"}
    assert numbers(there) == numbers(here)


def test_auto_puts_the_demo_on_the_accelerator(fake):
    assert next(tl.Model.open("demo", device="auto").module.parameters()).device.type == fake


def test_auto_spreads_a_folder_by_accelerate_or_says_what_is_missing(fake, monkeypatch, tmp_path):
    tl.Model.open("demo").module.save_pretrained(tmp_path / "model")
    tl.Model.open("demo").tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("tieline.models.model.find_spec", lambda name: None)
    with pytest.raises(TielineError, match=r"^device 'auto' .* accelerate, which is not installed"):
        tl.inspect(tmp_path / "model", **SMALL, device="auto")


def test_a_model_split_over_devices_by_hand_is_refused_in_one_line(fake):
    demo = tl.Model.open("demo")
    demo.module.model.layers[1].to(fake)
    line = r"^parts of the model are on cpu and fake:0: move it to one device, or let .{10,60}$"
    with pytest.raises(TielineError, match=line):
        tl.inspect((demo.module, demo.tokenizer), **SMALL)


def test_a_model_that_accelerate_spread_over_devices_gives_the_numbers_of_one(fake):
    demo = tl.Model.open("demo")
    device_map = {name: "cpu" for name, _ in demo.module.named_children()}
    device_map = {name: device for name, device in device_map.items() if name != "model"}
    device_map |= {f"model.{name}": "cpu" for name, _ in demo.module.model.named_children()}
    del device_map["model.layers"]
    layers = len(demo.module.model.layers)
    device_map |= {f"model.layers.{n}": fake if n % 2 else "cpu" for n in range(layers)}
    here = tl.inspect("demo", **SMALL, jumps=False)
    spread = dispatch_model(demo.module, device_map, main_device="cpu", force_hooks=True)
    there = tl.inspect((spread, demo.tokenizer), **SMALL, jumps=False)
    assert {p.device.type for p in spread.parameters()} == {"cpu", fake}
    assert_same(there, here)


def test_a_smoothed_model_on_the_device_computes_what_it_does_on_the_cpu(fake):
    ids, outputs = torch.arange(3, 51, device="cpu").view(2, 24), []
    for device in ("cpu", fake):
        model = tl.Model.open("demo").module.to(device).eval()
        smooth_(model, epsilon=0.3, gate="ramp")
        with torch.no_grad():
            outputs.append(model(input_ids=ids.to(device)).logits.cpu())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
