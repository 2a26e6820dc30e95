"""False alarms and power of `tieline.check` on routes of tiny models, development and held out.

    python benchmarks/check_families.py dev|held-out [--each 60] [--seed 0] [--json FILE]

Files are captures of models with random weights: the held-out half has other families, other kinds
of text and other seeds than the one that thresholds were chosen on. Every sound file is checked by
itself, with its tokens, and against a bfloat16 run of the same model; it is a false alarm if one of
the three calls it unsound. Faults of documents are judged where the tokens of the documents differ
in 16 positions or more. A fault is found if a finding of its case is unsound or suspicious.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

import tieline as tl
from tieline.trace.readers import Routes, routes_of_trace

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FIRST_SEED = {"dev": 0, "held-out": 50_000}
FAMILIES = {
    "dev": ("Mixtral", "Olmoe"),
    "held-out": ("Qwen3Moe", "GptOss", "DeepseekV3", "Qwen2Moe"),
}
LEAST_DIFFERENT = 16


def family_sizes(family: str, layers: int, experts: int, k: int) -> dict[str, Any]:
    """The fields of a tiny config of a family."""
    sizes = SIZES | {"num_hidden_layers": layers, "num_experts_per_tok": k}
    if family in ("Mixtral", "GptOss"):
        return sizes | {"num_local_experts": experts, "head_dim": 8}
    if family == "DeepseekV3":
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
        heads = {"qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 2, "topk_group": 2}
        more = {"n_routed_experts": experts, "first_k_dense_replace": 0}
        return sizes | ranks | heads | more | {"moe_intermediate_size": 16}
    more = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return sizes | {"num_experts": experts} | more | {"decoder_sparse_step": 1}


class Case(NamedTuple):
    """A model, its documents and its routes in float32 and bfloat16."""

    model: Any
    documents: list[np.ndarray]
    routes: Routes
    reference: Routes


def captured(model: Any, documents: list[np.ndarray]) -> Routes:
    """The routes of a model on documents."""
    with torch.no_grad(), tl.capture(model) as recorder:
        for ids in documents:
            model(torch.from_numpy(ids)[None])
    return routes_of_trace(recorder.trace(), "a")


def zipf_text(rng: np.random.Generator, length: int) -> np.ndarray:
    """Independent tokens with Zipf's law."""
    return 3 + rng.zipf(1.3, length) % 200


def prompted_text(rng: np.random.Generator, length: int) -> np.ndarray:
    """The same after a prompt that all documents share."""
    prompt = np.random.default_rng(1).integers(3, 203, 12)
    return np.concatenate([prompt, zipf_text(rng, length)])[:length]


def markov_text(rng: np.random.Generator, length: int) -> np.ndarray:
    """A chain in which few tokens follow each token."""
    follow = np.random.default_rng(2).integers(3, 120, (256, 4))
    tokens = [int(rng.integers(3, 120))]
    while len(tokens) < length:
        tokens.append(int(follow[tokens[-1], rng.integers(4)]))
    return np.array(tokens)


def listed_text(rng: np.random.Generator, length: int) -> np.ndarray:
    """Lines of a list: a number, some words, a line end."""
    lines = [np.concatenate([[5, 10 + n % 40], zipf_text(rng, 6), [4]]) for n in range(length)]
    return np.concatenate(lines)[:length]


TEXTS = {"dev": (zipf_text, prompted_text), "held-out": (markov_text, listed_text)}


def make_case(half: str, number: int) -> Case:
    """A random model of the half, its text and its routes."""
    seed = FIRST_SEED[half] + number
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    families, texts = FAMILIES[half], TEXTS[half]
    family, text = families[number % len(families)], texts[number // len(families) % len(texts)]
    experts = int(rng.choice([8, 16, 64]))
    k = int(rng.choice([1, 2, 4]))
    config = getattr(transformers, f"{family}Config")(
        **family_sizes(family, int(rng.integers(1, 5)), experts, k)
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    lengths = rng.integers(48, 120, int(rng.integers(5, 10)))
    documents = [text(rng, int(length)).astype(np.int64) for length in lengths]
    routes = captured(model, documents)
    coarse = captured(model.to(torch.bfloat16), documents)
    return Case(model.float(), documents, routes, coarse)


def without_tokens(routes: Routes) -> Routes:
    """The routes as a file that holds ids alone."""
    return Routes(routes.experts, "array", "a")


def rows_of(routes: Routes, number: int) -> np.ndarray:
    """Rows of a document."""
    assert routes.documents is not None
    return np.flatnonzero(routes.documents == number)


def differing(case: Case, first: int, second: int) -> int:
    """Positions at which two documents have different tokens."""
    a, b = case.documents[first], case.documents[second]
    count = min(len(a), len(b))
    return int((a[:count] != b[:count]).sum())


def replaced(routes: Routes, **changes: Any) -> Routes:
    """Routes with other ids or tokens."""
    fields = ("experts", "producer", "name", "tokens", "documents", "positions")
    return Routes(**{name: getattr(routes, name) for name in fields} | changes)


def exchanged(case: Case, rng: np.random.Generator) -> Routes | None:
    """Rows of two documents of the same length change places, as far as both go."""
    first, second = rng.choice(len(case.documents), 2, replace=False)
    if differing(case, first, second) < LEAST_DIFFERENT:
        return None
    a, b = rows_of(case.routes, first), rows_of(case.routes, second)
    count, ids = min(len(a), len(b)), case.routes.experts.copy()
    ids[a[:count]] = case.routes.experts[b[:count]]
    ids[b[:count]] = case.routes.experts[a[:count]]
    return replaced(case.routes, experts=ids)


def late(case: Case, rng: np.random.Generator) -> Routes | None:
    """Rows of a document are those of the token before."""
    rows, ids = rows_of(case.routes, int(rng.integers(len(case.documents)))), None
    tokens = case.routes.tokens
    assert tokens is not None
    if int((np.diff(tokens[rows]) != 0).sum()) >= LEAST_DIFFERENT:
        ids = case.routes.experts.copy()
        ids[rows[1:]] = case.routes.experts[rows[:-1]]
    return None if ids is None else replaced(case.routes, experts=ids)


def unrelated(case: Case, rng: np.random.Generator) -> Routes:
    """Token ids of another text."""
    tokens = case.routes.tokens
    assert tokens is not None
    return replaced(case.routes, tokens=rng.permutation(tokens))


def masked_with_ones(case: Case, rng: np.random.Generator) -> Routes:
    """Documents padded to one length, and the padding routed like text."""
    length = max(map(len, case.documents))
    padded = [np.pad(ids, (0, length - len(ids))) for ids in case.documents]
    return captured(case.model, padded)


def stale(case: Case, rng: np.random.Generator) -> Routes | None:
    """One layer of two or more repeats a row in a third of the rows."""
    ids = case.routes.experts.copy()
    if ids.shape[1] < 2:
        return None
    layer, third = int(rng.integers(ids.shape[1])), len(ids) // 3
    ids[third : 2 * third, layer] = ids[third, layer]
    return replaced(case.routes, experts=ids, tokens=None)


class Fault(NamedTuple):
    """How a fault is made, against what it is judged, and the cases that name it."""

    make: Callable[[Case, np.random.Generator], Routes | None]
    against: bool
    cases: tuple[str, ...]


FAULTS = {
    "2 requests exchanged, reference": Fault(exchanged, True, ("exchanged-documents",)),
    "2 requests exchanged, tokens only": Fault(exchanged, False, ("exchanged-documents",)),
    "1 request a row late, reference": Fault(late, True, ("shifted-documents",)),
    "1 request a row late, tokens only": Fault(late, False, ("shifted-documents",)),
    "tokens of another order": Fault(unrelated, False, ("unrelated", "lag", "exchanged-documents")),
    "mask of ones over padding": Fault(masked_with_ones, False, ("padding-shown",)),
    "a layer stale in a third of the rows": Fault(stale, False, ("layer-run", "constant")),
}


def alarms(case: Case) -> list[str]:
    """Cases by which a sound file is called unsound."""
    results = [
        tl.check(without_tokens(case.routes)),
        tl.check(case.routes),
        tl.check(case.routes, against=case.reference),
    ]
    return [f.case for r in results for f in r.findings if f.severity == "unsound"]


def judge(half: str, each: int, first: int = 0) -> dict[str, Any]:
    """Check every file of a half, from number `first` on."""
    counts, causes = Counter(), Counter()
    for number in range(first, first + each):
        case = make_case(half, number)
        findings = alarms(case)
        counts["sound files"] += 1
        counts["false alarms"] += bool(findings)
        causes.update(set(findings))
        rng = np.random.default_rng(FIRST_SEED[half] + number)
        for name, fault in FAULTS.items():
            faulty = fault.make(case, rng)
            if faulty is None:
                continue
            result = tl.check(faulty, against=case.reference if fault.against else None)
            counts[f"{name}: files"] += 1
            named = {f.case for f in result.findings if f.severity != "note"}
            counts[f"{name}: found"] += bool(named & set(fault.cases))
            counts[f"{name}: unsound"] += not result.sound
    return {"half": half, "counts": dict(counts), "alarms by case": dict(causes)}


def main() -> None:
    """Run a half and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("half", choices=sorted(FIRST_SEED))
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="another number: other files")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = judge(options.half, options.each, 1_000_000 * options.seed)
    counts = result["counts"]
    print(f"sound: {counts['false alarms']} of {counts['sound files']} called unsound", end=" ")
    print(result["alarms by case"])
    print("| fault | files | found | called unsound |\n|---|---|---|---|")
    for name in FAULTS:
        columns = (counts.get(f"{name}: {x}", 0) for x in ("files", "found", "unsound"))
        print(f"| {name} | " + " | ".join(map(str, columns)) + " |")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
