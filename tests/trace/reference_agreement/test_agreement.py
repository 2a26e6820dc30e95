"""Which fault explains that routes disagree with a reference."""

import numpy as np
import pytest

from tests.trace.test_soundness import EXPERTS, IDS, sound
from tieline.trace.readers import Routes
from tieline.trace.reference_agreement import agreement_findings, choice_agreement

RNG = np.random.default_rng(7)


def routes(ids, **fields):
    return Routes(ids, "array", "a", **fields)


def other_precision(ids, share=0.1):
    """The same run with some of its last choices changed."""
    changed = ids.copy()
    for layer in range(ids.shape[1]):
        rows = np.flatnonzero(RNG.random(len(ids)) < share)
        changed[rows, layer, -1] = EXPERTS
    return changed


def explained(ids, **fields):
    return agreement_findings(routes(ids, **fields), routes(IDS))


def test_agreement_is_1_for_equal_choices_and_0_for_strangers():
    a, b = (sound(2000, seed=seed)[0][:, 0] for seed in (1, 2))
    assert choice_agreement(a, a) == pytest.approx(1)
    assert choice_agreement(a, a[:, ::-1]) == pytest.approx(1)
    assert abs(choice_agreement(a, b)) < 0.05
    half = np.where(np.arange(2000)[:, None] % 2 == 0, a, b)
    assert choice_agreement(half, a) == pytest.approx(0.5, abs=0.05)


def test_one_choice_that_fills_a_layer_agrees_with_itself():
    constant = np.broadcast_to(np.arange(4), (200, 4))
    assert choice_agreement(constant, constant) == 1
    assert choice_agreement(constant, constant + 1) < 1


def test_another_precision_needs_no_explanation():
    assert explained(IDS) == []
    assert explained(other_precision(IDS)) == []
    assert explained(IDS[::-1], positions=np.arange(len(IDS))[::-1].copy()) != []


def test_rows_are_matched_by_document_and_position():
    order = RNG.permutation(len(IDS))
    moved = routes(IDS[order], positions=order)
    assert agreement_findings(moved, routes(IDS, positions=np.arange(len(IDS)))) == []
    away = routes(IDS, positions=np.arange(len(IDS)) + 1000)
    assert agreement_findings(away, routes(IDS, positions=np.arange(len(IDS)))) == []


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda x: np.roll(x, 1, axis=1), "layer-shift", "stand in other places"),
        (lambda x: x[:, 1:], "layer-shift", "4 routed layers, the reference 5"),
        (lambda x: x[:, [1, 0, 2, 3, 4]], "layer-shift", "0→1, 1→0"),
        (lambda x: x[:, [4, 2, 0, 1, 3]], "layer-shift", "5 of 5 layers"),
        (lambda x: np.roll(x, 1, axis=0), "token-shift", "-1 places"),
        (lambda x: np.roll(x, -5, axis=0), "token-shift", "+5 places"),
        (lambda x: np.concatenate([x[:90], x[:210]]), "token-shift", "-90 places"),
        (lambda x: (x + 5) % 40, "out-of-range", "renumbered"),
        (lambda x: x + 1, "out-of-range", "one is subtracted"),
        (lambda x: sound(300, seed=9)[0], "token-shift", "no more than by chance"),
        (lambda x: x[..., :2], "layer-shift", "2 experts per token, the reference 3"),
    ],
)
def test_the_fault_that_explains_it_is_named(change, kind, message):
    (finding,) = explained(change(other_precision(IDS)))
    assert (finding.kind, finding.severity) == (kind, "unsound")
    assert message in finding.message


def test_token_ids_of_another_tokenizer_are_no_sound_file():
    tokens = np.arange(len(IDS))
    shared = routes(IDS, tokens=tokens)
    assert agreement_findings(routes(IDS, tokens=tokens), shared) == []
    (finding,) = agreement_findings(routes(IDS, tokens=tokens + 600), shared)
    assert (finding.case, finding.severity, finding.count) == ("other-ids", "unsound", len(IDS))
    assert finding.where == "row 0: 600, in the reference 0"
    unknown = routes(IDS, tokens=np.full(len(IDS), -1))
    assert agreement_findings(unknown, shared) == []


def test_one_layer_of_another_model():
    ids = other_precision(IDS)
    ids[:, 2] = sound(300, seed=5)[0][:, 2]
    (finding,) = explained(ids)
    assert finding.kind == "constant-layer"
    assert "layers.2" in finding.message


def test_a_dense_layer_in_another_place():
    zeros = np.zeros_like(IDS[:, :1])
    reference = routes(IDS, layer_names=tuple(f"model.layers.{i}.mlp.gate" for i in range(1, 6)))
    good, bad = (np.insert(IDS, index, zeros[:, 0], axis=1) for index in (0, 2))
    assert agreement_findings(routes(good), reference) == []
    (finding,) = agreement_findings(routes(bad), reference)
    assert finding.kind == "layer-shift"
    assert "[0, 1, 3, 4, 5] of 6" in finding.message


@pytest.mark.parametrize("seed", range(3))
def test_choices_that_differ_more_and_more_along_positions(seed):
    ids, _ = sound(1200, 4, seed=seed)
    rng = np.random.default_rng(seed)
    growing = rng.random(1200) < np.linspace(0, 0.6, 1200)
    changed = ids.copy()
    changed[growing, :, -1] = (changed[growing, :, -1] + 16) % 32
    fields = {"positions": np.arange(1200)}
    reference = Routes(ids, "array", "b", **fields)
    (finding,) = agreement_findings(Routes(changed, "array", "a", **fields), reference)
    assert (finding.case, finding.severity) == ("position-drift", "suspicious")
    assert "rope base" in finding.cause
    changed = other_precision(ids)
    assert agreement_findings(Routes(changed, "array", "a", **fields), reference) == []
