"""Complete inspections: a tiny model in detail, the demo model for its numbers."""

import json

import pytest
import torch

from tests.models.tiny import lively, tiny_model
from tests.tiers import tiers
from tieline.analysis.inspect import inspect
from tieline.analysis.jumps import JumpSettings
from tieline.analysis.route_files import load
from tieline.core.errors import TielineError
from tieline.measure.measures import MeasureSettings, measure
from tieline.models import capture
from tieline.models.demo import load_demo_tokenizer
from tieline.models.model import Model
from tieline.run.plan import IN_ALL
from tieline.trace import save_summary, save_trace, summarise

TEXT = "def area(width, height):\n    return width * height  # <script>\n" * 12
QUICK = MeasureSettings(sigmas=(1e-2,), precisions=("bf16",))
SMALL = {"measure_settings": QUICK, "jump_settings": JumpSettings(near=16, random=16)}


@pytest.fixture(scope="module")
def model():
    return lively(tiny_model("olmoe", vocab_size=512))


@pytest.fixture(scope="module")
def tokenizer():
    return load_demo_tokenizer()


@pytest.fixture(scope="module")
def progress_calls():
    return []


@pytest.fixture(scope="module")
def result(model, tokenizer, progress_calls):
    def progress(stage, done, total):
        progress_calls.append((stage, done, total))

    return inspect(
        (model, tokenizer),
        text=TEXT,
        tokens=200,
        batch_size=3,
        sequence_length=32,
        loss_jumps=True,
        progress=progress,
        **SMALL,
    )


def test_the_trace_is_what_capture_gives(model, tokenizer, result):
    ids = torch.tensor(tokenizer(TEXT)["input_ids"][:200]).to(model.device)
    with torch.inference_mode(), capture(model) as recorder:
        model(input_ids=ids[:192].view(6, 32))
        model(input_ids=ids[None, 192:])
    expected, trace = recorder.trace(), result.trace
    assert torch.equal(trace.tokens, ids.cpu())
    for expected_layer, layer in zip(expected.layers, trace.layers, strict=True):
        assert torch.equal(expected_layer.experts[:, :2], layer.experts[:, :2])
        assert torch.allclose(expected_layer.scores, layer.scores, atol=1e-6)
        assert layer.inputs is None
    assert torch.equal(expected.documents, trace.documents)


def test_the_measures_are_those_of_the_trace(result):
    again = measure(result.trace, QUICK)
    for again_layer, layer in zip(again.layers, result.measures.layers, strict=True):
        assert (again_layer.load, again_layer.gap, again_layer.noise) == (
            layer.load,
            layer.gap,
            layer.noise,
        )
        assert layer.product.status == layer.angular.status == "ok"  # inputs were there for them


def test_every_section_is_there(result):
    inspection = result
    names = [layer.name for layer in result.trace.layers]
    assert [layer.name for layer in inspection.measures.layers] == names
    assert [layer.name for layer in inspection.jumps] == names
    assert all(12 < layer.value.loss.swaps <= 16 for layer in inspection.jumps)
    assert {"flip@bf16", "jump", "loss", "dead"} <= set(inspection.metrics)
    assert inspection.verdict.startswith("Served in bf16, ")
    assert inspection.serving.tokens == 200
    assert inspection.metrics["kl@model bf16"] == inspection.serving.kl.value
    assert {"flips", "jump", "loss", "tokens"} <= {finding.kind for finding in inspection.findings}
    assert (
        "".join(piece.text for piece in inspection.sample.pieces)
        == TEXT[: len("".join(piece.text for piece in inspection.sample.pieces))]
    )
    assert len(inspection.sample.pieces) == 32
    stages = {"tokenise", "forward", "measure", "jumps", "served precision", "total"}
    assert set(inspection.timings) == stages | {"tokens_per_second"}
    assert all(seconds > 0 for seconds in inspection.timings.values())


def test_the_provenance_tells_model_text_and_settings(result):
    provenance = result.provenance
    assert provenance == result.trace.provenance == result.measures.provenance
    assert provenance["model_type"] == "olmoe"
    assert provenance["text"]["source"] == ""
    assert (provenance["tokens"], provenance["sequences"], provenance["sequence_length"]) == (
        200,
        7,
        32,
    )
    assert (provenance["batch_size"], provenance["seed"]) == (3, 0)


def test_progress_is_told_to_the_end(result, progress_calls):
    calls = [call for call in progress_calls if call[0] != IN_ALL]  # only slow machines send these
    last = {stage: (done, total) for stage, done, total in calls}
    served = {"served precision": (9, 9)}
    assert last == {"forward": (3, 3), "jumps": (2, 2), "losses": (2, 2)} | served
    stages = ["forward"] * 3 + ["jumps"] * 2 + ["losses"] * 2 + ["served precision"] * 9
    assert [stage for stage, *_ in calls] == stages


def test_the_dictionary_is_json_and_holds_everything(result):
    record = result.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    jumps = result.jumps[0].value
    assert record["jumps"][0]["value"]["near"]["jumps"] == list(jumps.near.jumps)
    assert record["findings"][0]["text"] == result.findings[0].text
    assert record["measures"]["layers"][0]["name"] == result.trace.layers[0].name


def test_the_same_seed_gives_the_same_result(model, tokenizer, result):
    options = {"tokens": 200, "batch_size": 3, "sequence_length": 32, **SMALL}
    again = inspect((model, tokenizer), text=TEXT, **options)
    other = inspect((model, tokenizer), text=TEXT, seed=1, **options)
    assert again.measures == inspect((model, tokenizer), text=TEXT, **options).measures
    first_jumps, repeated_jumps, other_seed_jumps = (
        r.jumps[0].value for r in (result, again, other)
    )
    assert first_jumps.near.jumps == repeated_jumps.near.jumps == other_seed_jumps.near.jumps
    assert first_jumps.random == repeated_jumps.random != other_seed_jumps.random
    assert repeated_jumps.loss is None


def test_some_layers_without_jumps(model, tokenizer):
    name = "model.layers.1.mlp.gate"
    for layers in ([1], [name]):
        inspection = inspect(
            (model, tokenizer),
            text=TEXT,
            tokens=64,
            layers=layers,
            jumps=False,
            measure_settings=QUICK,
        )
        (jumps,) = inspection.jumps
        assert (jumps.name, jumps.value) == (name, None)
        assert jumps.status == "not measured: jumps were not asked for"
        assert not [f for f in inspection.findings if f.kind == "gap"]


def test_a_saved_trace_is_measured_without_the_model(result, tmp_path):
    save_trace(result.trace, tmp_path / "trace")
    save_summary(summarise(result.trace), tmp_path / "summary")
    for source in (tmp_path / "trace", str(tmp_path / "trace"), load(tmp_path / "trace")):
        inspection = inspect(source, measure_settings=QUICK)
        assert torch.equal(inspection.trace.tokens, result.trace.tokens)
        assert inspection.measures == measure(result.trace, QUICK)
        assert inspection.provenance == result.trace.provenance
        assert {jumps.status for jumps in inspection.jumps} == {
            "not measured: jumps need the model"
        }
        assert inspection.metrics["flip@bf16"] == result.metrics["flip@bf16"]
        assert "jump" not in inspection.metrics
    counted = inspect(tmp_path / "summary", measure_settings=QUICK)
    assert counted.metrics["dead"] == result.metrics["dead"]


def test_the_wrong_kind_of_source_is_refused_with_what_is_taken(model, tmp_path, no_axis_checks):
    for wrong in (3, model, [model, 1], (1, 2)):
        with pytest.raises(
            TielineError, match=r"takes a trace .* a folder, .*\(model, tokenizer\)"
        ):
            inspect(wrong)
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(TielineError):
        inspect(tmp_path / "r.json")


def test_a_short_text_and_the_models_own_length(model, tokenizer):
    inspection = inspect((model, tokenizer), text="two words", tokens=64, **SMALL)
    assert inspection.trace.n_tokens == len(tokenizer("two words")["input_ids"])
    inspection = inspect(
        (model, tokenizer), text=TEXT, tokens=300, jumps=False, measure_settings=QUICK
    )
    assert inspection.provenance["sequence_length"] == 128


def test_the_model_is_left_as_it_was(tokenizer):
    model = lively(tiny_model("olmoe", vocab_size=512)).train()
    classes = [type(module) for module in model.modules()]
    inspect((model, tokenizer), text=TEXT, tokens=64, **SMALL)
    assert [type(module) for module in model.modules()] == classes
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": " \n"}, "text is empty"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"layers": [7]}, "no layers"),
        ({"layers": ["nowhere"]}, "no routers named"),
        ({"layers": []}, "at least one router"),
    ],
)
def test_bad_input_is_refused(model, tokenizer, changes, message):
    arguments = {"text": TEXT, "tokens": 32, **SMALL, **changes}
    with pytest.raises(TielineError, match=message):
        inspect((model, tokenizer), **arguments)


def test_models_without_experts_and_broken_scores_are_refused(tokenizer):
    with pytest.raises(TielineError, match="not a Mixture-of-Experts model"):
        inspect((torch.nn.Linear(2, 2), tokenizer), text=TEXT)
    broken = lively(tiny_model("olmoe", vocab_size=512))
    broken.model.layers[1].mlp.gate.weight[3] = torch.nan
    with pytest.raises(
        TielineError, match=r"weight 'model.layers.1.mlp.gate.weight': 32 of .* NaN"
    ):
        inspect((broken, tokenizer), text=TEXT, tokens=32)
    broken.model.layers[1].mlp.gate.weight[3] = 3e38  # finite, but its products are not
    with pytest.raises(TielineError, match=r"layer 1: 32 .* NaN"):
        inspect((broken, tokenizer), text=TEXT, tokens=32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4", "jetmoe", "dbrx", "zaya"])
def test_other_kinds_of_routers_are_inspected(tokenizer, family):
    sizes = {"vocab_size": 512}
    sizes |= {"vocab_size_per_layer_input": 512} if family == "gemma4" else {}
    model = lively(tiny_model(family, **sizes))
    inspection = inspect((model, tokenizer), text=TEXT, tokens=96, sequence_length=32, **SMALL)
    json.dumps(inspection.to_dict(), allow_nan=False)
    assert any(layer.value is not None for layer in inspection.jumps)


@pytest.mark.slow
def test_the_demo_model():
    inspection = inspect("demo", loss_jumps=True)
    assert inspection.trace.n_tokens == 16384
    assert 0.001 < inspection.metrics["flip@bf16"] < 0.02
    assert all(layer.status == "ok" for layer in inspection.jumps)
    assert 0.05 < inspection.metrics["jump"] < 1
    assert inspection.metrics["dead"] == 0


def test_what_an_inspection_holds_is_shown_in_a_few_lines(model, tokenizer, result):
    with capture(model) as recorder:
        model(input_ids=torch.arange(3, 40)[None])
    trace = result.trace
    shown = [trace, trace.layers[0], summarise(trace), result, result.measures, result.sample]
    shown += [result.measures.layers[0], result.jumps[0].value, recorder, Model(model, tokenizer)]
    assert max(len(repr(value)) for value in shown) < 1500


@pytest.mark.parametrize("text", ["a" * 600, "a", "ab", "The cat sat on the mat. " * 40])
def test_repetitive_and_short_texts_are_inspected(text):
    result = inspect("demo", text=text)
    assert result.verdict
    assert result.to_html()


def test_a_run_of_the_demo_is_called_so_however_it_was_loaded():
    loaded = Model.open("demo")
    result = inspect((loaded.module, loaded.tokenizer), tokens=64, jumps=False)
    assert result.provenance["model"] == "demo"
    assert Model.open("demo", stream=True).provenance.model == "demo"


@pytest.mark.parametrize("family", tiers(["mixtral", "gpt_oss", "deepseek_v3"], always=["mixtral"]))
def test_a_streamed_model_is_served_as_the_same_in_memory(family, tmp_path, tokenizer):
    folder = tmp_path / "model"
    lively(tiny_model(family, vocab_size=512)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    run = {"tokens": 80, "sequence_length": 20, "batch_size": 2, "jumps": False, "serve": "int8"}
    streamed, loaded = (
        inspect(folder, text=TEXT, stream=stream, dtype=dtype, **run)
        for stream, dtype in ((True, "auto"), (False, "fp32"))
    )
    assert loaded.serving.kl.value > 0
    assert streamed.serving == loaded.serving
    assert streamed.noise == loaded.noise
