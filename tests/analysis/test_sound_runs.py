"""Sound runs: results that the compared runs already contain are reused, unchanged."""

from dataclasses import replace

import torch

from tests.models.tiny import lively, tiny_model
from tieline.analysis import alignment, comparison
from tieline.analysis import diff as diff_module
from tieline.analysis.compared_sides import ModelSide, trace_model
from tieline.analysis.comparison import compare_runs
from tieline.analysis.diff import diff, diff_models
from tieline.analysis.noise_size import ExpectedFormat
from tieline.analysis.sound_runs import _trace_routers_only, sound_runs
from tieline.core.records import to_plain
from tieline.models.model import Model
from tieline.run import schedule
from tieline.trace.record import identical_values


def numbers(result):
    plain = to_plain(result)
    plain.pop("timings")
    return plain


def sides():
    model = lively(tiny_model("olmoe"))
    return ModelSide(model), ModelSide(model, "bf16")


def sequences(count, length=24):
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(0, 64, (count, length), generator=generator))


def test_a_plain_run_that_was_recorded_equals_one_that_is_run_again(monkeypatch):
    monkeypatch.setattr("tieline.analysis.sound_runs.REFERENCE_TOKENS", 100)
    reused = numbers(diff_models(*sides(), sequences(8), batch_size=4))
    monkeypatch.setattr(diff_module, "recorded_plain_run", lambda *arguments: None)
    assert reused == numbers(diff_models(*sides(), sequences(8), batch_size=4))


def test_batches_that_the_reference_tokens_cut_are_run_again(monkeypatch):
    monkeypatch.setattr("tieline.analysis.sound_runs.REFERENCE_TOKENS", 24 * 6)
    returned, real = [], diff_module.recorded_plain_run

    def recorded(*arguments):
        returned.append(real(*arguments))
        return returned[-1]

    monkeypatch.setattr(diff_module, "recorded_plain_run", recorded)
    diff_models(*sides(), sequences(8), batch_size=4)
    assert returned == [None]


def test_one_name_given_twice_is_loaded_once(monkeypatch):
    opened, load = [], Model.open
    monkeypatch.setattr(Model, "open", lambda *a, **k: opened.append(a) or load(*a, **k))
    once = numbers(diff("demo", "demo", tokens=600, dtype_b="bf16-emulated"))
    assert len(opened) == 1
    monkeypatch.setattr(diff_module, "_side_on_same_weights", lambda *arguments: None)
    assert once == numbers(diff("demo", "demo", tokens=600, dtype_b="bf16-emulated"))
    assert len(opened) == 3


def test_a_file_of_one_late_layer_is_compared_with_that_layer_of_the_sound_runs():
    model = lively(tiny_model("olmoe"))
    ids = sequences(8)
    a, b = (trace_model(ModelSide(model, name), ids) for name in (None, "bf16"))
    late = replace(b, layers=b.layers[1:], provenance={})
    bf16 = ExpectedFormat("bf16", "as asked")
    references = sound_runs([ModelSide(model)], [a], ids, bf16, 4)
    compared = compare_runs(a, late, references=references, expected=bf16)
    assert compared.aligned.layers_before == 1
    assert compared.excess == ()
    all_layers = compare_runs(a, replace(b, provenance={}), references=references, expected=bf16)
    assert all_layers.aligned.layers_before == 0


def test_a_comparison_makes_these_passes_and_no_others(monkeypatch):
    monkeypatch.setattr("tieline.analysis.sound_runs.REFERENCE_TOKENS", 24 * 4)
    passes, real = [], schedule.forward

    def counted(model, ids, *, predicts=True):
        passes.append((tuple(ids.shape), predicts))
        return real(model, ids, predicts=predicts)

    monkeypatch.setattr(schedule, "forward", counted)
    diff_models(*sides(), sequences(8), batch_size=4)
    both = [((4, 24), True)] * 4  # A and B, whose first batch is also the plain run
    attention = [((2, 24), False)] * 2
    padding = [((3, 48), False), ((1, 48), False)]
    seeds = [((4, 24), False)] * 2
    assert passes == both + attention + padding + seeds


def test_tokens_and_swaps_that_all_reference_runs_share_are_read_once(monkeypatch):
    sides_read, layers_read = [], []
    check, swaps = alignment._unranked_tokens_by_layer, comparison.swap_margins
    monkeypatch.setattr(
        alignment, "_unranked_tokens_by_layer", lambda t, s: sides_read.append(s) or check(t, s)
    )
    monkeypatch.setattr(
        comparison, "swap_margins", lambda a, b: layers_read.append(a.name) or swaps(a, b)
    )
    result = diff_models(*sides(), sequences(8), batch_size=4)
    assert sides_read == ["A", "B", "A"] + 5 * ["B"]
    assert layers_read == [layer.name for layer in result.layers]


def test_reference_runs_end_at_the_last_router_with_the_same_routes():
    side, texts, calls = ModelSide(lively(tiny_model("olmoe")), "bf16"), sequences(4), []
    full_trace = trace_model(side, texts, batch_size=2)
    after = side.model.get_output_embeddings()
    handle = after.register_forward_pre_hook(lambda *call: calls.append(call))
    assert identical_values(full_trace, _trace_routers_only(side, texts, 2))
    assert not calls
    logits = side.model(torch.stack(texts)).logits  # nothing of the pass that was cut stays behind
    handle.remove()
    assert len(calls) == 1
    assert torch.equal(logits, lively(tiny_model("olmoe"))(torch.stack(texts)).logits)


def test_a_model_given_twice_is_compared_as_its_name_given_twice():
    loaded = Model.open("demo", dtype="fp32")
    pair = loaded.module, loaded.tokenizer
    options = {"tokens": 256, "dtype_b": "bf16-emulated"}
    by_module, by_name = (
        diff(pair, pair, **options),
        diff("demo", "demo", dtype_a="fp32", **options),
    )
    assert by_module.metrics == by_name.metrics
    assert by_module.metrics["flip"] > 0
