"""The blind protocol: its hash, its split, and generators that do what they say."""

from argparse import Namespace

import pytest
import torch

from benchmarks import blind_sample
from benchmarks.blind import attention, changes, models, pairs, protocol, strength, tables, texts
from benchmarks.blind.faults import FAULTS
from benchmarks.blind.models import KINDS, kind_named
from benchmarks.blind.pairs import Pair, split
from benchmarks.blind.precisions import PRECISIONS
from benchmarks.blind.sound import FUNCTION_KEPT, SOUND, STRESS

KIND = "mixtral 2 of 8"


@pytest.fixture(scope="module")
def subject():
    return models.subject(KIND, 7)


def outputs(change, model, ids, precision="float32"):
    """Logits of B under a change of weights or context, fed plainly."""
    case = changes.reference_case(change, model, ids, 5)
    case.reference = changes.run_reference(case)
    exact = case.model(input_ids=ids, use_cache=False).logits
    change.weights(case)
    with change.context(case):
        return exact, case.model(input_ids=ids, use_cache=False).logits


def change_named(name):
    return next(x for x in (*SOUND, *FAULTS) if x.name == name)


def test_the_recorded_hash_is_that_of_the_sources():
    assert protocol.HASH.read_text().strip() == protocol.source_digest()


def test_halves_share_no_family_fault_or_seed():
    first, second = split()["development"], split()["held-out"]
    families = [{kind_named(name).family for name in half["kinds"]} for half in (first, second)]
    assert not families[0] & families[1]
    assert not set(first["faults"]) & set(second["faults"])
    assert not set(first["weight_seeds"]) & set(second["weight_seeds"])
    assert {*first["faults"], *second["faults"]} == {fault.name for fault in FAULTS}
    assert {*first["kinds"], *second["kinds"]} == {kind.name for kind in KINDS}


def test_there_are_as_many_kinds_and_pairs_as_promised():
    assert len(KINDS) >= 12
    assert len(SOUND) >= 20
    assert len(FAULTS) >= 30
    for half in ("development", "held-out"):
        listed = [x for x in pairs.pairs(half) if x.kind != "smollm2 mixture"]
        counts = {s: sum(x.section == s for x in listed) for s in ("sound", "faulty")}
        assert min(counts.values()) >= 400, counts
        assert len(set(listed)) == len(listed)
    seeds = [{x.text for x in pairs.pairs(half)} for half in ("development", "held-out")]
    assert not seeds[0] & seeds[1]


@pytest.mark.parametrize("name", ["adapters not merged", "neurons renumbered", "outliers in B"])
def test_a_sound_change_keeps_the_function(subject, name):
    ids = texts.documents(subject.tokenizer, "development", 2, 48, 3)
    exact, other = outputs(change_named(name), subject.model, ids)
    torch.testing.assert_close(other, exact, rtol=1e-4, atol=1e-4)
    assert name in FUNCTION_KEPT


@pytest.mark.parametrize("name", ["packed", "padding on the left", "decoded with a cache"])
def test_a_sound_feed_routes_alike(subject, name):
    runs = runs_of(subject, name, "float32")
    assert sum(strength.flips(*runs)) == 0


@pytest.mark.parametrize("name", ["expert swapped", "rope base", "stale cache entries"])
def test_a_fault_changes_the_outputs(subject, name):
    ids = texts.documents(subject.tokenizer, "development", 2, 48, 3)
    exact, other = outputs(change_named(name), subject.model, ids)
    assert (other - exact).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["packed documents leak", "padding leaks", "rows late"])
def test_a_fault_of_feed_or_file_changes_the_routes(subject, name):
    assert sum(strength.flips(*runs_of(subject, name, "float32"))) > 5


def runs_of(subject, name, precision):
    ids = texts.documents(subject.tokenizer, "development", 4, 48, 3)
    change = change_named(name)
    case = changes.reference_case(change, subject.model, ids, 5)
    case.reference = changes.run_reference(case)
    other = changes.run_changed(change, PRECISIONS[precision], case)
    torch.testing.assert_close(other.tokens, case.reference.tokens)
    torch.testing.assert_close(other.documents, case.reference.documents)
    return case.reference, other


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "mxfp4", "fp8 cache", "tf32"])
def test_precisions_add_noise_and_leave_the_model_alone(subject, precision):
    before = [p.clone() for p in subject.model.parameters()]
    a, b = runs_of(subject, "precision alone", precision)
    errors = (a.layers[-1].scores[:, 0] - b.layers[-1].scores[:, 0]).abs()
    assert 0 < errors.median() < 1
    assert all(map(torch.equal, subject.model.parameters(), before))


def test_attention_is_what_it_was_after_an_edit(subject):
    before = subject.model.config._attn_implementation
    with attention.edited_attention(subject.model, lambda call: call):
        pass
    assert subject.model.config._attn_implementation == before


def test_a_fault_is_exempt_only_if_its_limit_is_below_the_ratio():
    plain = ((100, 50),) * 5
    assert strength.judged(
        ((101, 51), (99, 50), (102, 49), (100, 50), (101, 52)), plain, False
    ).exempt
    assert not strength.judged(((100, 70),) * 5, plain, False).exempt
    assert not strength.judged(
        ((100, 45), (60, 50), (90, 90), (100, 50), (99, 44)), plain, False
    ).exempt
    assert strength.judged(((0, 0),) * 5, ((0, 0),) * 5, True).exempt
    assert not strength.judged(((0, 1),) * 5, ((0, 0),) * 5, True).exempt


def test_limits_and_corrections():
    assert tables.upper_limit(0, 100) == pytest.approx(1 - 0.05**0.01)
    assert tables.excess(0, 50) == 1.0
    assert tables.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_a_pair_is_written_with_its_facts(subject, monkeypatch, tmp_path):
    pair = Pair("development", "sound", "precision alone", KIND, "bf16", "traces", 7, 1, 2)
    monkeypatch.setattr(
        protocol, "verdict", lambda *_: {"conclusion": "", "alarm": False, "patterns": []}
    )
    out = tmp_path / "out.jsonl"
    header = {"half": "development", "hash": "0"}
    list(protocol.run([pair], out, header, None, ask=True))
    assert not list(protocol.run([pair], out, header, None, ask=True))  # resumed: nothing left
    read, lines = protocol.read(out)
    assert read == header
    assert lines[0]["change"] == "precision alone"
    assert lines[0]["seconds"].keys() == {"strength", "runs", "diff"}
    tables.show(read, lines)


def test_stress_has_two_hundred_of_each():
    for half in ("development", "held-out"):
        for change in STRESS:
            assert sum(x.change == change.name for x in pairs.pairs(half)) == 200


def test_a_sample_is_in_random_order_that_its_seed_fixes():
    options = Namespace(seed=4, sections=["sound", "faulty"], kinds=None)
    sample = blind_sample.drawn(options)
    assert sample == blind_sample.drawn(options)
    assert len({pair.kind for pair in sample[:200]}) == 10  # all kinds but the SmolLM2 mixture
    assert {pair.section for pair in sample} == {"sound", "faulty"}
    of_one = blind_sample.drawn(Namespace(**vars(options) | {"kinds": ["smollm2 mixture"]}))
    assert {pair.kind for pair in of_one} == {"smollm2 mixture"}
    assert not set(sample) & set(of_one)
