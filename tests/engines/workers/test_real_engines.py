"""The whole path with vLLM, MLX and llama.cpp themselves, run by `make test-engines`."""

import json
import os
import sys

import numpy as np
import pytest

import tieline as tl
from benchmarks import engines as bench
from tieline.core.errors import TielineError
from tieline.engines import ENGINES, EngineError, capture, installed_engine
from tieline.models.demo import DEMO_FOLDER

pytestmark = pytest.mark.skipif(
    not os.environ.get("TIELINE_TEST_ENGINES"),
    reason="inference engines take 4 GB: `make test-engines` installs and runs them",
)
SIZE = {"tokens": 4096, "sequence_length": 256}
SHORT = {"tokens": 2048, "sequence_length": 256}


def needs(*names):
    for name in names:
        if not installed_engine(ENGINES[name]).python:
            pytest.skip(f"{name} is not installed: python -m tools.install_engines {name}")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def gguf(work):
    """Write the demo model, or a changed copy, as GGUF."""
    needs("llama.cpp")
    before = list(sys.path)
    bench.with_gguf()
    from tools.demo_gguf import write_gguf

    def model_file(kind, folder=DEMO_FOLDER):
        path = work / f"{folder.name}-{kind}.gguf"
        if not path.exists():
            write_gguf(path, kind, folder)
        return path

    yield model_file
    sys.path[:] = before


@pytest.fixture(scope="module")
def rope(work):
    return bench.changed(work, "rope", bench.hidden_base)


@pytest.fixture(scope="module")
def swapped(work):
    folder = bench.changed(work, "experts", lambda _: None)
    bench.swapped_experts(folder)
    return folder


@pytest.fixture(scope="module")
def mlx_4(work):
    needs("mlx")
    bench.quantise_mlx(DEMO_FOLDER, work / "mlx-4", 4)
    return work / "mlx-4"


@pytest.fixture
def side(request, gguf):
    """The demo model in an engine."""
    needs(request.param)
    return f"llama.cpp:{gguf('f32')}" if request.param == "llama.cpp" else f"{request.param}:demo"


@pytest.mark.parametrize("side", ["llama.cpp", "mlx", "vllm"], indirect=True)
def test_in_float32_every_choice_is_that_of_transformers(side):
    comparison = tl.diff("demo", side, **SIZE)
    assert [layer.flip.count for layer in comparison.layers] == [0, 0, 0, 0]
    assert comparison.layers[0].flip.total == 4096
    assert comparison.logits.kl < 1e-9
    assert comparison.provenance["b"]["off_scores"] == [0, 0, 0, 0]
    assert comparison.causes.conclusion == "no flips"


@pytest.fixture(scope="module")
def shared(work):
    """A model whose shared experts have gates of one row, which a GGUF stores as vectors."""
    return bench.random_model(work, "qwen2_moe")


@pytest.mark.parametrize("engine", ["llama.cpp", "mlx", "vllm"])
def test_in_float32_a_family_with_shared_experts_chooses_as_transformers(engine, shared, gguf):
    needs(engine)
    model = gguf("f32", shared) if engine == "llama.cpp" else shared
    comparison = tl.diff(str(shared), f"{engine}:{model}", **SHORT)
    assert [layer.flip.count for layer in comparison.layers] == [0, 0, 0]


def test_a_file_that_llama_cpp_quantised_is_explained_by_ties(work, shared, gguf):
    path = work / "shared-q8_0.gguf"
    bench.quantise_gguf(gguf("f32", shared), path, bench.KQUANTS["q8_0"])
    comparison = tl.diff(str(shared), f"llama.cpp:{path}", **SHORT)
    assert not comparison.causes.alarm, comparison.verdict
    assert 8 < comparison.dequantised.bits < 9
    assert comparison.dequantised.engine_any.value < comparison.tokens.anywhere.value


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_llama_cpp_in_fewer_bits_is_explained_by_ties(gguf, kind):
    comparison = tl.diff("demo", f"llama.cpp:{gguf(kind)}", **SIZE)
    assert not comparison.causes.alarm, comparison.verdict
    assert (comparison.dequantised is None) == (kind == "f16")
    if comparison.dequantised is not None:
        assert comparison.dequantised.engine_any.count < comparison.tokens.anywhere.count


def test_settings_of_llama_cpp_by_default_are_explained_by_ties(gguf):
    comparison = tl.diff("demo", f"llama.cpp:{gguf('f32')}", engine_defaults=True, **SIZE)
    assert comparison.provenance["b"]["settings"]["kv"] == "F16"
    assert not comparison.causes.alarm, comparison.verdict


def test_mlx_in_4_bits_is_explained_by_its_weights(mlx_4):
    comparison = tl.diff("demo", f"mlx:{mlx_4}", **SIZE)
    assert not comparison.causes.alarm, comparison.verdict
    assert 4 < comparison.dequantised.bits < 5
    assert comparison.dequantised.engine_any.value < 0.2 * comparison.dequantised.format_any.value


def test_vllm_in_bf16_is_explained_by_ties_some_of_them_exact():
    needs("vllm")
    comparison = tl.diff("demo", "vllm:demo", dtype_b="bf16", **SIZE)
    assert not comparison.causes.alarm, comparison.verdict
    assert sum(comparison.provenance["b"]["ties"]) > 0


def test_the_rope_base_that_mlx_lm_ignores_is_found(rope):
    needs("mlx")
    comparison = tl.diff(str(rope), f"mlx:{rope}", dtype_a="fp32", **SHORT)
    assert comparison.causes.alarm
    assert "positions" in {pattern.kind for pattern in comparison.causes.patterns}


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm"])
def test_another_rope_base_is_found(engine, rope, gguf):
    needs(engine)
    model = gguf("f32", rope) if engine == "llama.cpp" else rope
    comparison = tl.diff("demo", f"{engine}:{model}", **SHORT)
    assert comparison.causes.alarm
    assert "positions" in {pattern.kind for pattern in comparison.causes.patterns}


@pytest.mark.parametrize("engine", ["llama.cpp", "mlx", "vllm"])
def test_exchanged_experts_are_found(engine, swapped, gguf):
    needs(engine)
    model = gguf("f32", swapped) if engine == "llama.cpp" else swapped
    comparison = tl.diff("demo", f"{engine}:{model}", **SHORT)
    assert comparison.causes.alarm, comparison.verdict


@pytest.mark.parametrize("engine", ["llama.cpp", "mlx", "vllm"])
def test_the_same_tokens_run_with_and_without_capture(engine, gguf, monkeypatch):
    needs(engine)
    monkeypatch.setattr(bench, "ROUNDS", 2)
    model = gguf("f32") if engine == "llama.cpp" else DEMO_FOLDER
    timing = bench.timed(engine, model, [np.arange(1, 40), np.arange(5)])
    assert timing["tokens"] == 44
    assert timing["plain"] > 0
    assert 0 < timing["low"] <= timing["value"] <= timing["high"]


@pytest.mark.parametrize("engine", ["mlx", "vllm"])
def test_a_model_that_an_engine_does_not_take_is_one_line(engine, work):
    needs(engine)
    folder = bench.changed(work, "strange", lambda config: config.update(STRANGE))
    with pytest.raises(EngineError, match=r"[Ss]trange") as caught:
        capture(folder, engine=engine, ids=[[1, 2, 3]])
    assert "\n" not in str(caught.value)


STRANGE = {"model_type": "strange", "architectures": ["StrangeForCausalLM"]}


def test_a_file_that_is_cut_or_of_another_model_is_one_line(gguf, work):
    cut = work / "cut.gguf"
    cut.write_bytes(gguf("q4_0").read_bytes()[:100_000])
    with pytest.raises(EngineError, match="does not take"):
        capture(cut, engine="llama.cpp", ids=[[1, 2, 3]])
    with pytest.raises(EngineError, match=r"token 700 .* of another model"):
        capture(gguf("f32"), engine="llama.cpp", ids=[[1, 700]])


def test_a_quantised_model_that_is_not_is_refused_with_its_bits(work):
    needs("mlx")
    quantisation = {"quantization": {"group_size": 64, "bits": 4}}
    folder = bench.changed(work, "said", lambda config: config.update(quantisation))
    with pytest.raises(EngineError, match=r"16\.00 bits per weight"):
        capture(folder, engine="mlx", ids=[[1, 2, 3]])


def test_the_documented_commands_write_traces_that_agree(gguf, tmp_path):
    from typer.testing import CliRunner

    from tieline.cli.app import app_with_commands

    first, second = tmp_path / "transformers", tmp_path / "llama.cpp"
    engine = f"--engine llama.cpp --tokens-from {first} -o {second}"
    for command in (
        f"capture demo -o {first}",
        f"capture {gguf('f32')} {engine}",
        f"diff {first} {second} --max-flip 0 --json {tmp_path / 'd.json'}",
    ):
        done = CliRunner().invoke(app_with_commands(), command.split())
        assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "d.json").read_text())["metrics"]["flip"] == 0


def test_an_engine_in_the_wrong_python_names_what_is_missing(gguf):
    with pytest.raises(TielineError, match="has no module llama_cpp"):
        capture(gguf("f32"), engine="llama.cpp", ids=[[1, 2]], python=sys.executable)
