"""Traces on disk: exact round trips, lazy loading, and refusal of damaged folders."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.zoo import make_trace, recipes
from tieline.core.errors import TraceError
from tieline.trace import RoutingTrace, concatenate, load_trace, save_trace, select_layers
from tieline.trace.record import LazyLayers, identical_values
from tieline.trace.store import FORMATS, INDEX, write_tensor_folder

# the type checker would look into a random layer of every loaded trace
pytestmark = pytest.mark.usefixtures("axes_unchecked")
TRACE = make_trace()


@settings(max_examples=15)
@given(recipes)
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, recipe):
    trace = make_trace(**{**recipe, "broken": 0.0})
    where = tmp_path_factory.mktemp("trace") / "new" / "folder"
    save_trace(trace, where)
    assert identical_values(load_trace(where), trace)
    assert [entry.name for entry in where.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_survive(tmp_path, dtype):
    layer = TRACE.layers[0]
    layer = dataclasses.replace(
        layer, scores=layer.scores.to(dtype), experts=layer.experts.to(torch.int16)
    )
    trace = dataclasses.replace(TRACE, layers=(layer,), tokens=TRACE.tokens.int())
    save_trace(trace, tmp_path / "a")
    assert identical_values(load_trace(tmp_path / "a"), trace)


def test_tensors_that_share_memory_and_no_tokens_at_all_are_saved(tmp_path):
    ids = torch.arange(20)
    shared = dataclasses.replace(TRACE, tokens=ids, positions=ids, documents=ids)
    for name, trace in (("shared", shared), ("empty", make_trace(tokens=0))):
        save_trace(trace, tmp_path / name)
        assert identical_values(load_trace(tmp_path / name), trace)


def test_layers_are_read_when_touched(tmp_path):
    save_trace(TRACE, tmp_path / "a")
    trace = load_trace(tmp_path / "a")
    assert isinstance(trace.layers, LazyLayers)
    _damage(tmp_path / "a" / "layer-00001.safetensors", -3)
    assert identical_values(trace.layers[0], TRACE.layers[0])
    assert identical_values(trace.layers[-1], TRACE.layers[3])
    with pytest.raises(TraceError, match=r"layer-00001.*damaged"):
        _ = trace.layers[1]


def test_a_loaded_layer_is_mapped_and_not_copied(tmp_path):
    save_trace(TRACE, tmp_path / "a")
    layer = load_trace(tmp_path / "a").layers[0]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the system does not list its memory maps")
    file = str(tmp_path / "a" / "layer-00000.safetensors")
    spans = [line.split()[0].split("-") for line in maps.read_text().splitlines() if file in line]
    for name in ("scores", "weights", "experts"):
        address = getattr(layer, name).data_ptr()
        assert any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def test_loaded_traces_can_be_cut_joined_and_saved_again(tmp_path):
    save_trace(TRACE, tmp_path / "a")
    loaded = load_trace(tmp_path / "a")
    both = concatenate([loaded, loaded], documents="renumber")
    assert isinstance(both.layers, LazyLayers)
    selection = select_layers(both, ["layers.2", 0])
    save_trace(selection, tmp_path / "b")
    expected = concatenate([TRACE, TRACE], documents="renumber")
    assert identical_values(load_trace(tmp_path / "b"), select_layers(expected, [2, 0]))


def test_existing_things_are_left_alone(tmp_path):
    target = tmp_path / "a"
    save_trace(TRACE, target)
    other = make_trace(seed=1)
    with pytest.raises(TraceError, match="exists"):
        save_trace(other, target)
    assert identical_values(load_trace(target), TRACE)
    save_trace(other, target, overwrite=True)
    assert identical_values(load_trace(target), other)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("what", ["file", "foreign", "link", "more"])
def test_overwriting_never_removes_what_is_not_a_trace(tmp_path, what):
    target = tmp_path / "a"
    if what == "file":
        target.write_text("mine")
    elif what == "foreign":
        target.mkdir()
        (target / "thesis.txt").write_text("mine")
    else:
        save_trace(TRACE, tmp_path / "b")
        (tmp_path / "b" / "notes.txt").write_text("mine") if what == "more" else None
        target.symlink_to(tmp_path / "b")
        target = target if what == "link" else tmp_path / "b"
    with pytest.raises(TraceError, match="left alone"):
        save_trace(TRACE, target, overwrite=True)
    assert target.exists()


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "a").mkdir()
    save_trace(TRACE, tmp_path / "a")
    assert identical_values(load_trace(tmp_path / "a"), TRACE)


def test_a_trace_with_broken_scores_is_not_saved(tmp_path):
    trace = make_trace(broken=0.5)
    with pytest.raises(TraceError, match=r"layer 0: scores that are not finite: \d+ of 20"):
        save_trace(trace, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_provenance_must_be_json(tmp_path):
    trace = dataclasses.replace(TRACE, provenance={"seed": math.nan})
    with pytest.raises(TraceError, match="no JSON value: nan"):
        save_trace(trace, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys, torch
torch.set_num_threads(1)
os.fsync = lambda handle: None  # no power is cut here, and disks are slow
from pathlib import Path
from tests.trace.zoo import FACTS, make_trace
from tieline.core import files
from tieline.trace import load_trace, save_trace, store
from tieline.trace.record import identical_values

def die_at(line, only):
    executed_lines = 0
    def tracer(frame, event, _):
        nonlocal executed_lines
        if frame.f_code.co_filename not in (store.__file__, files.__file__):
            return None
        if only and frame.f_code.co_name not in only:
            return tracer
        if event == "line":
            executed_lines += 1
            if executed_lines == line:
                os._exit(9)
        return tracer
    return tracer

PLACING = "_place_folder", "_exchange_replaceable", "_exchange_folders", "_renameat2"
where, outcomes, lines = Path(sys.argv[1]), set(), 0
old, new = (make_trace(seed, tokens=2, facts=FACTS[:1]) for seed in (1, 2))
for replacing in (False, True):
    for line in range(1, 10_000):
        target = where / f"{replacing}-{line}"
        if replacing:
            save_trace(old, target)
        child = os.fork()
        if child == 0:
            sys.settrace(die_at(line, PLACING if replacing else ()))
            save_trace(new, target, overwrite=replacing)
            os._exit(0)
        finished = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        if not target.exists():
            outcomes.add((replacing, "absent"))
        else:
            loaded = load_trace(target)
            state = "new" if identical_values(loaded, new) else "old"
            assert state == "new" or (replacing and identical_values(loaded, old))
            outcomes.add((replacing, state))
        lines += 1
        if finished:
            break
assert outcomes >= {(False, "absent"), (False, "new"), (True, "old"), (True, "new")}, outcomes
print("lines", lines)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs fork")
def test_a_save_killed_at_any_line_leaves_nothing_or_everything(tmp_path):
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[1]) > 40


def _damage(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _touch(trace: RoutingTrace):
    return [layer.experts.sum() for layer in trace.layers]


@settings(max_examples=60)
@given(st.data())
def test_damaged_folders_are_refused_with_one_kind_of_error(tmp_path_factory, data):
    where = tmp_path_factory.mktemp("damaged") / "a"
    save_trace(make_trace(tokens=3), where)
    names = sorted(entry.name for entry in where.iterdir())
    path = where / data.draw(st.sampled_from(names))
    content = bytearray(path.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "remove", "append", "swap", "empty"])):
        case "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "append":
            content += b"\0" * data.draw(st.integers(1, 9))
        case "swap":
            content = (where / data.draw(st.sampled_from(names))).read_bytes()
        case "empty":
            content = b""
        case "remove":
            content = None
    path.unlink() if content is None else path.write_bytes(content)
    try:
        _touch(load_trace(where))
    except TraceError:
        return
    untouched = path.name == INDEX or content == path.read_bytes()
    assert untouched  # letters of a name may change without making the index wrong


def signed(where, change_index=None, **files):
    """A folder whose digests are valid and whose contents are wrong."""
    layers = [{"name": "a", "facts": dataclasses.asdict(TRACE.layers[0].facts)}]
    ids = torch.arange(2)
    tensors = {
        "tokens": {"tokens": ids, "documents": ids, "positions": ids},
        "layer-00000": {"experts": torch.tensor([[0, 1, 2], [3, 4, 5]])},
        **{name.replace("_", "-"): part for name, part in files.items()},
    }
    contents = {"layers": layers, "epsilons": [0.5], "provenance": {}}
    write_tensor_folder(where, FORMATS["trace"], 1, contents, tensors.items(), overwrite=False)
    if change_index:
        index = json.loads((where / INDEX).read_text())
        change_index(index)
        (where / INDEX).write_text(json.dumps(index))
    return where


def test_the_smallest_folder_is_a_trace(tmp_path):
    trace = load_trace(signed(tmp_path / "a"))
    assert trace.layers[0].experts.tolist() == [[0, 1, 2], [3, 4, 5]]


LAYER = {"experts": torch.tensor([[0, 1, 2], [3, 4, 5]]), "scores": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": torch.tensor([[0, 1, 6]] * 2)}, r"experts outside 0 ... 5: 2 of 2"),
        ({"experts": torch.tensor([[0, 1, 2], [0, 1, -1]])}, "1 of 2, the first at index 1"),
        ({"experts": torch.tensor([[0, 1, 0]] * 2)}, "an expert twice"),
        ({"experts": torch.tensor([[0, 1, 2]])}, "tokens=2"),
        ({"experts": torch.tensor([[0], [1]]), "scores": None}, "k <= ranks"),
        ({"experts": torch.zeros(2, 3)}, "experts must hold integers"),
        ({"experts": torch.zeros(2, 3, dtype=torch.bool)}, "type BOOL"),
        ({"experts": torch.zeros(2, 3, dtype=torch.complex64)}, "type C64"),
        ({"experts": None}, "experts missing"),
        ({"other": torch.zeros(1)}, r"\['other'\] unknown"),
        ({"../../x": torch.zeros(1)}, "unknown"),
        ({"scores": torch.full((2, 3), math.nan)}, "scores that are not finite"),
        ({"scores": torch.full((2, 3), math.inf)}, "scores that are not finite"),
        ({"scores": torch.full((2, 3), -math.inf)}, "scores that are not finite"),
        ({"scores": torch.tensor([[3.0, 2.0, math.nan]] * 2)}, "scores that are not finite"),
        ({"scores": torch.tensor([[3.0, 2.0, 2.5]] * 2)}, "do not descend"),
        ({"scores": torch.zeros(2, 2)}, "ranks=3"),
        ({"weights": torch.full((2, 2), math.nan)}, "weights that are not finite"),
        ({"distance": torch.tensor([-1.0, 0.0])}, "distance negative or not a number: 1 of 2"),
        ({"group_gap": torch.tensor([0.0, math.nan])}, "group_gap negative"),
        ({"near": torch.tensor([[7], [0]])}, r"outside 0 ... 6: 1 of 2"),
        ({"near": torch.tensor([[7, 7], [0, 0]])}, "epsilons=1"),
        ({"bias": torch.tensor([math.inf] * 6)}, "bias that are not finite"),
        ({"inputs": torch.full((2, 1), math.nan)}, "inputs that are not finite"),
    ],
)
def test_impossible_layers_are_refused(tmp_path, change, message):
    part = {name: value for name, value in {**LAYER, **change}.items() if value is not None}
    with pytest.raises(TraceError, match=message):
        _touch(load_trace(signed(tmp_path / "a", layer_00000=part)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.update(format="other"), "must be tieline-trace version 1, got 'other'"),
        (lambda i: i.update(version=2), "got 'tieline-trace' version 2"),
        (lambda i: i.update(version=True), "version True"),
        (lambda i: i.update(extra=1), "must have"),
        (lambda i: i.pop("epsilons"), "must have"),
        (lambda i: i.update(epsilons="abc"), "list of numbers"),
        (lambda i: i.update(epsilons=[True]), "list of numbers"),
        (lambda i: i.update(epsilons=[2, 1]), "ascending"),
        (lambda i: i.update(epsilons=[]), None),
        (lambda i: i.update(provenance=[]), "JSON object"),
        (lambda i: i.update(layers=[]), "1 ... 4096 layers"),
        (lambda i: i.update(layers=i["layers"] * 2), "same name"),
        (lambda i: i.update(layers=[3]), "JSON object"),
        (lambda i: i["layers"][0].update(name=3), "needs a name"),
        (lambda i: i["layers"][0].update(name="x" * 2000), "needs a name"),
        (lambda i: i["layers"][0].update(facts=3), "facts must be"),
        (lambda i: i["layers"][0]["facts"].update(k=2.0), "facts must be"),
        (lambda i: i["layers"][0]["facts"].update(k=True), "facts must be"),
        (lambda i: i["layers"][0]["facts"].update(k=99), "1 <= k <= E"),
        (lambda i: i["layers"][0]["facts"].update(n_experts=1 << 40), "65536"),
        (lambda i: i["layers"][0]["facts"].update(units="volts"), "volts"),
        (lambda i: i["layers"][0]["facts"].pop("affine"), "facts must be"),
        (lambda i: i["files"].pop("layer-00000"), "no size and digest"),
        (lambda i: i["files"]["tokens"].update(bytes=1), "the index says 1"),
        (lambda i: i["files"]["tokens"].update(sha256="0"), "damaged"),
        (lambda i: i.update(files=[]), "no size and digest"),
    ],
)
def test_impossible_indices_are_refused(tmp_path, change, message):
    where = signed(tmp_path / "a", change)
    if message is None:
        _touch(load_trace(where))
        return
    with pytest.raises(TraceError, match=message):
        _touch(load_trace(where))


@pytest.mark.parametrize(
    "part",
    [
        {"tokens": torch.arange(2), "documents": torch.arange(2)},
        {"tokens": torch.arange(2), "documents": torch.arange(2), "positions": torch.arange(3)},
        {"tokens": torch.zeros(2), "documents": torch.arange(2), "positions": torch.arange(2)},
    ],
)
def test_token_ids_that_do_not_fit_are_refused(tmp_path, part):
    with pytest.raises(TraceError, match=r"tokens must|positions must|documents must"):
        load_trace(signed(tmp_path / "a", tokens=part))


def test_a_header_that_promises_too_much_is_refused_before_it_is_read(tmp_path):
    where = signed(tmp_path / "a")
    path = where / "layer-00000.safetensors"
    size = path.stat().st_size
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])
    assert path.stat().st_size == size
    with pytest.raises(TraceError, match="not a safetensors file: header of 4611686018427387904"):
        load_trace(where)


def test_folders_of_other_kinds_are_no_traces(tmp_path):
    with pytest.raises(TraceError, match=r"is no folder with a tieline\.json"):
        load_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="is no folder"):
        load_trace(tmp_path)
    (tmp_path / INDEX).mkdir()
    with pytest.raises(TraceError, match="is no folder"):
        load_trace(tmp_path)
