"""Summaries on disk: exact round trips, and refusal of impossible counts."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.zoo import make_trace, recipes
from tieline.core.errors import TraceError
from tieline.trace import (
    load_summary,
    load_trace,
    merge_summaries,
    save_summary,
    select_tokens,
    summarise,
)
from tieline.trace.record import identical_values
from tieline.trace.store import (
    FORMATS,
    INDEX,
    _files_to_write,
    _index_contents,
    write_tensor_folder,
)
from tieline.trace.summary import SharedBias, TokenKey

pytestmark = pytest.mark.usefixtures("axes_unchecked")
SUMMARY = summarise(make_trace(broken=0.2), 8)


@settings(max_examples=15)
@given(recipes, st.sampled_from([2, 4096]))
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, recipe, size):
    summary = summarise(make_trace(**recipe), size, keep_inputs=True)
    where = tmp_path_factory.mktemp("summary") / "a"
    save_summary(summary, where)
    assert identical_values(load_summary(where), summary)


def test_loaded_summaries_merge_like_those_in_memory(tmp_path):
    trace = make_trace(broken=0.2)
    shards = [select_tokens(trace, slice(0, 7)), select_tokens(trace, slice(7, None))]
    for index, shard in enumerate(shards):
        save_summary(summarise(shard, 8), tmp_path / str(index))
    merged = merge_summaries([load_summary(tmp_path / "1"), load_summary(tmp_path / "0")])
    assert identical_values(merged, SUMMARY)


def test_overwriting_is_explicit_and_only_for_summaries(tmp_path):
    save_summary(SUMMARY, tmp_path / "a")
    with pytest.raises(TraceError, match="exists"):
        save_summary(SUMMARY, tmp_path / "a")
    other = summarise(make_trace(seed=1))
    save_summary(other, tmp_path / "a", overwrite=True)
    assert identical_values(load_summary(tmp_path / "a"), other)
    with pytest.raises(TraceError, match="must be tieline-trace version 1"):
        load_trace(tmp_path / "a")


def changed(layer=0, **fields):
    layers = list(SUMMARY.layers)
    layers[layer] = dataclasses.replace(layers[layer], **fields)
    return dataclasses.replace(SUMMARY, layers=tuple(layers))


def tensors(where, summary=SUMMARY, **replaced):
    """A folder with valid digests in which tensors of the first layer's counts are replaced."""

    def files():
        for name, part in _files_to_write(summary):
            if name == "counts-00000":
                part = {**part, **{key.replace("__", "."): x for key, x in replaced.items()}}
                part = {key: x for key, x in part.items() if x is not None}
            yield name, part

    write_tensor_folder(
        where, FORMATS["summary"], 1, _index_contents(summary), files(), overwrite=False
    )
    return where


def raised(counts, by=1):
    counts = counts.clone()
    counts.view(-1)[0] += by
    return counts


L = SUMMARY.layers[0]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"load": raised(L.load)}, "load must be counts that add up to 40"),
        ({"load": raised(raised(L.load, 100), 0) - 100}, "load must be counts"),
        ({"load": None}, "'load'.* missing"),
        ({"load": L.load[1:]}, "'load'"),
        ({"load": L.load.int()}, "int64"),
        ({"gaps": raised(L.gaps.counts)}, "gaps must be counts"),
        ({"gaps": L.gaps.counts[1:]}, "'gaps'"),
        ({"near": raised(L.near, -1)}, "near must be counts"),
        ({"orders": raised(L.orders)}, "orders must be counts"),
        ({"distances": raised(L.distances.counts, 1 << 40)}, "distances must be counts"),
        ({"coalitions": L.coalitions.hashes.flip(0)}, "ascending"),
        ({"coalitions": -L.coalitions.hashes.flip(0) - 1}, "ascending"),
        ({"coalitions": torch.arange(21)}, "at most 20"),
        ({"coalitions": torch.zeros(2, 2, dtype=torch.int64)}, "'coalitions'"),
        ({"moments__first": None}, "incomplete"),
        ({"moments__low": L.moments.low - 1}, "too large"),
        ({"moments__high": L.moments.high + (1 << 60)}, "too large"),
        ({"moments__first": L.moments.first - (1 << 60)}, "too large"),
        ({"moments__count": L.moments.count + 99}, "too large"),
        ({"other": torch.zeros(1)}, "no count is called 'other'"),
    ],
)
def test_counts_that_cannot_be_are_refused(tmp_path, replaced, message):
    with pytest.raises(TraceError, match=message):
        load_summary(tensors(tmp_path / "a", **replaced))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["layers"][0].update(tokens=-1), "tokens must be an integer"),
        (lambda i: i["layers"][0].update(tokens=1 << 60), "tokens must be an integer"),
        (lambda i: i["layers"][0].update(tokens=True), "tokens must be an integer"),
        (lambda i: i["layers"][0].update(tokens=21), "add up to 42"),
        (lambda i: i["layers"][0].update(nonfinite=99), "nonfinite must be an integer"),
        (lambda i: i["layers"][0].update(first_nonfinite=None), "first_nonfinite"),
        (lambda i: i["layers"][0].update(first_nonfinite=[1]), "first_nonfinite"),
        (lambda i: i["layers"][0].update(first_nonfinite=[1, 0.5]), "first_nonfinite"),
        (lambda i: i["layers"][0].update(group_decides=99), "group_decides"),
        (lambda i: i["layers"][0].update(bias_changed=1), "bias_changed"),
        (lambda i: i["layers"][0].pop("tokens"), "tokens must be an integer"),
        (lambda i: i.update(sample_size=0), "sample"),
        (lambda i: i.update(sample_size="8"), "sample_size must be an integer"),
        (lambda i: i.update(sample_size=1 << 40), None),
        (lambda i: i.update(sources={}), "sources a list"),
        (lambda i: i.update(sources=[1]), "JSON object"),
        (lambda i: i.update(extra=1), "must have"),
        (lambda i: i["layers"].pop(), None),
    ],
)
def test_impossible_indices_are_refused(tmp_path, change, message):
    save_summary(SUMMARY, tmp_path / "a")
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    change(index)
    (tmp_path / "a" / INDEX).write_text(json.dumps(index))
    if message is None:
        load_summary(tmp_path / "a")
        return
    with pytest.raises(TraceError, match=message):
        load_summary(tmp_path / "a")


def test_a_first_broken_token_without_broken_tokens_is_refused(tmp_path):
    intact = summarise(make_trace())
    broken = dataclasses.replace(intact.layers[0], first_nonfinite=TokenKey(0, 0))
    save_summary(dataclasses.replace(intact, layers=(broken, *intact.layers[1:])), tmp_path / "a")
    with pytest.raises(TraceError, match="first_nonfinite"):
        load_summary(tmp_path / "a")


def test_a_changed_bias_survives(tmp_path):
    save_summary(changed(bias=SharedBias(None, changed=True)), tmp_path / "a")
    assert load_summary(tmp_path / "a").layers[0].bias.changed
    assert not load_summary(tmp_path / "a").layers[1].bias.changed


@settings(max_examples=30)
@given(st.data())
def test_damaged_folders_are_refused_with_one_kind_of_error(tmp_path_factory, data):
    where = tmp_path_factory.mktemp("damaged") / "a"
    save_summary(SUMMARY, where)
    path = where / data.draw(st.sampled_from(sorted(entry.name for entry in where.iterdir())))
    content = bytearray(path.read_bytes())
    offset = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[offset] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[offset:]
    path.write_bytes(content)
    try:
        load_summary(where)
    except TraceError:
        return
    assert path.name == INDEX
