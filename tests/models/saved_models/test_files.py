"""Names, folders, fields and sizes that are refused before a model is loaded."""

import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

import tieline
from tieline.core.errors import TielineError, UnsupportedModelError, UnusedTensorsWarning
from tieline.core.untrusted_input import check_stored, model_source
from tieline.models.configuration import check_config_fields
from tieline.models.demo import DEMO_FOLDER
from tieline.models.model import Model, load_dense, load_tokenizer
from tieline.models.saved_models import load_pretrained

Peak = tuple[int, float, str]
"""Exit code, largest memory in MiB and messages of a command."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the model in the box."""
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def change_config(folder: Path, **fields: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("intermediate_size", 3_000_000),
        ("vocab_size", 3_000_000),
        ("hidden_size", 3_000_000),
        ("num_experts", 1_000_000),
        ("num_hidden_layers", 9_999),
        ("vocab_size", 400_000_000),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_sizes_beyond_the_files_are_refused_without_their_memory(folder, field, value, stream):
    change_config(folder, **{field: value})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TielineError, match=r"config.json (says|describes)"):
        Model.open(folder, stream=stream)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_of_fewer_layers_than_its_files_is_refused(folder, stream):
    change_config(folder, num_hidden_layers=3, layer_types=None)
    with pytest.raises(UnsupportedModelError, match=r"3 of 'model.layers', .* hold number 3"):
        Model.open(folder, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_layers_that_predict_further_tokens_and_other_unused_tensors_are_named(folder, stream):
    change_config(folder, num_hidden_layers=3, layer_types=None, num_nextn_predict_layers=1)
    with pytest.warns(UnusedTensorsWarning, match=r"no use for \d+ of the tensors .*layers.3"):
        model = Model.open(folder, stream=stream)
    assert len(model.routers) == 3


def test_every_door_to_a_model_checks_its_size(folder):
    change_config(folder, intermediate_size=3_000_000)
    for load in (load_dense, load_pretrained):
        with pytest.raises(TielineError, match=r"config.json (says|describes)"):
            load(folder)


def test_sizes_beyond_sharded_files_are_refused(folder):
    model = load_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="1MB")
    (folder / "model.safetensors").unlink()
    assert Model.open(folder).routers
    change_config(folder, intermediate_size=3_000_000)
    with pytest.raises(TielineError, match=r"config.json (says|describes)"):
        Model.open(folder)


def test_tied_weights_are_counted_once(folder):
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert Model.open(change_config(folder, tie_word_embeddings=True)).routers


def test_sizes_that_fit_the_files_pass():
    check_stored(json.loads((DEMO_FOLDER / "config.json").read_text()), DEMO_FOLDER)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "../secret.safetensors"}}', "names '../secret.safetensors'"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "names '/etc/x.safetensors'"),
        ('{"weight_map": {"a": 5}}', "names '5'"),
        ('{"weight_map": {"a": ["b"]}}', "which is no safetensors file beside it"),
        ('{"weight_map": []}', r"holds \[\], where fields are needed"),
        ("{}", "holds None, where fields are needed"),
        ("[" * 50_000, "not valid JSON"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_index_that_leaves_its_folder_or_is_none_is_refused_by_name(
    folder, text, message, stream
):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(TielineError, match=rf"model.safetensors.index.json: .*{message}"):
        tieline.inspect(folder, tokens=64, stream=stream)


@pytest.mark.parametrize("text", ["null", "[]", '"x"', "3"])
def test_a_configuration_without_fields_is_refused_by_name(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(TielineError, match=r"config.json: holds .*, where fields are needed"):
        tieline.inspect(folder, tokens=64)


@pytest.mark.parametrize("offsets", [[0, -4], [-8, -4], [4, 0], [0, 4 * 10**12]])
def test_a_header_that_is_not_true_of_its_file_is_called_damaged(folder, offsets):
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}
    data = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
    with pytest.raises(TielineError, match=r"'model.safetensors' is damaged or cut off"):
        tieline.inspect(folder, tokens=64)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json", "x.bin"])
def test_named_pipes_are_refused_at_once(folder, file):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    for load in (Model.open, load_dense, load_tokenizer, load_pretrained):
        with pytest.raises(TielineError, match=f"'{file}' in .* is a named pipe, not a file"):
            load(folder)


def test_devices_are_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(TielineError, match="is a device, not a file"):
        Model.open(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "org/kernel"},
        {"_attn_implementation": "org/kernel@v1:fn"},
        {"_attn_implementation_internal": "org/kernel"},
        {"experts_implementation": "org/kernel"},
        {"text_config": {"attn_implementation": "org/kernel"}},
        {"attn_implementation": {"text_config": "org/kernel"}},
    ],
)
def test_code_of_the_hub_is_not_named_by_a_configuration(folder, fields):
    field = re.search(r"_?(attn|experts)_implementation\w*", json.dumps(fields))
    assert field is not None
    with pytest.raises(TielineError, match=f"says {field[0]}='org/kernel"):
        Model.open(change_config(folder, **fields))
    check_config_fields(fields, trust_remote_code=True)


def test_code_beside_a_model_that_transformers_does_not_know_is_refused_by_name(folder):
    change_config(folder, model_type="unheard", auto_map={"AutoConfig": "configuration.Config"})
    (folder / "configuration.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(TielineError, match="auto_map"):
        Model.open(folder)


def test_code_beside_a_known_model_is_left_alone(folder):
    change_config(folder, auto_map={"AutoConfig": "configuration.Config"})
    (folder / "configuration.py").write_text("raise SystemExit('this ran')")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["configuration.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert Model.open(folder).routers
    assert len(load_tokenizer(folder)) == 512


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("awq", "quantised by awq, which is read with gptqmodel: pip install gptqmodel"),
        ("gptq", "pip install optimum gptqmodel|pip install gptqmodel"),
        ("bitsandbytes", "pip install bitsandbytes"),
        ("compressed-tensors", "pip install compressed-tensors"),
        ("unheard", "quantised by 'unheard', which transformers does not read"),
    ],
)
def test_weights_that_need_another_package_say_which(folder, method, message):
    with pytest.raises(TielineError, match=message):
        Model.open(change_config(folder, quantization_config={"quant_method": method}))


def test_an_adapter_names_its_base(tmp_path):
    fields = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(TielineError, match="is an adapter of 'org/base': merge it"):
        Model.open(tmp_path)


def test_a_file_of_a_model_is_no_model(folder):
    with pytest.raises(TielineError, match="is one file of a model: give the folder"):
        Model.open(folder / "model.safetensors")
    with pytest.raises(TielineError, match="is a file, where the folder of a model"):
        model_source(folder / "tokenizer.json")


def test_a_gguf_says_which_command_runs_it(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(TielineError, match=r"tieline capture \S+ --engine llama.cpp"):
        Model.open(file)


PEAK = """
import json, os, sys
from tieline.cli import app, main
for line in sys.stdin:
    log, *words = json.loads(line)
    if os.fork() == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        try:
            main(words)
        except SystemExit as left:
            (peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
            print("peak", left.code, peak.split()[1], flush=True)
        os._exit(0)
    os.wait()
    print("end", flush=True)
"""


@pytest.fixture(scope="module")
def peak_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Peak]]:
    """Run a command: its exit code, largest memory in MiB and messages.

    Each runs in a fork of one process that has imported the command line: the peak of a fork begins
    with the memory of that process and is its own.
    """
    log = tmp_path_factory.mktemp("log") / "stderr"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PEAK], **pipes) as process:

        def run(*arguments: object) -> Peak:
            log.unlink(missing_ok=True)
            process.stdin.write(json.dumps([str(log), *map(str, arguments)]) + "\n")
            process.stdin.flush()
            *_, last_line = iter(process.stdout.readline, "end\n")
            _, code, peak = last_line.split()
            return int(code), int(peak) / 1024, log.read_text()

        yield run
        process.stdin.close()


@pytest.fixture(scope="module")
def start(peak_of: Callable[..., Peak]) -> float:
    """Memory of the command line itself, in MiB."""
    return peak_of("--version")[1]


def hostile_model(folder: Path, kind: str) -> Path:
    if kind == "pipe":
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")
        return folder
    if kind == "kernel":
        return change_config(folder, attn_implementation="org/kernel")
    return change_config(folder, **{kind: 3_000_000})


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's account of memory"
)
@pytest.mark.parametrize(
    "kind", ["intermediate_size", "vocab_size", "hidden_size", "pipe", "kernel"]
)
@pytest.mark.parametrize("command", ["inspect", "audit", "soften", "upcycle"])
def test_refusing_a_model_takes_the_memory_of_the_command_line(
    folder, peak_of, start, kind, command
):
    code, peak, message = peak_of(command, hostile_model(folder, kind))
    assert code == 2
    assert message.startswith("error: ")
    assert len(message.splitlines()) == 1
    assert peak <= 1.2 * start


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files whose content is much larger than they are, and a pipe."""
    folder = tmp_path_factory.mktemp("archives")
    os.mkfifo(folder / "pipe.npz")
    (folder / "bomb.jsonl.gz").write_bytes(gzip.compress(b"\n" * (90 << 20)))
    for name, shape in (("bomb.npz", (1 << 24, 4, 2)), ("flat.npz", 1 << 22)):
        np.savez_compressed(folder / name, routed_experts=np.zeros(shape, np.uint8))
    return folder


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's account of memory"
)
@pytest.mark.parametrize("kind", ["bomb.npz", "flat.npz", "bomb.jsonl.gz", "pipe.npz"])
@pytest.mark.parametrize("command", ["check", "inspect", "convert"])
def test_refusing_an_archive_takes_the_memory_of_the_command_line(
    archives, peak_of, start, kind, command
):
    file = archives / kind
    code, peak, message = peak_of(command, file)
    assert code == 2
    assert str(file) in message
    assert len(message.splitlines()) == 1
    assert peak <= 1.2 * start


def test_what_is_given_after_options_is_refused_as_soon(folder, peak_of):
    change_config(folder, vocab_size=3_000_000)
    _, peak, message = peak_of("audit", "--tokens", "64", folder)
    assert "config.json says vocab_size=3000000 and hidden_size=" in message
    assert peak < 100  # MiB: the parser of options is loaded, torch is not
