"""Runs routers of torch, transformers, vLLM, MLX and llama.cpp over the battery of `testing`.

    python -m tools.conformance                     # all whose engine is installed
    python -m tools.conformance mlx-olmoe torch     # those whose names begin so
    python -m tools.conformance --table             # rows of the table in docs/conformance.md

Engines run in their own Python (`python -m tools.install_engines`); routers of one that is not
installed are named and left out.
"""

import argparse
import io
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tieline.core.errors import TielineError
from tieline.engines.engine_registry import engine_named, environment_of, find_python
from tieline.testing import RULES, Conformance, RouterHabits, RouterRule
from tieline.testing.conformance import SIZES, Router, check_router, router_habits
from tieline.testing.transformers_router import family_router

__all__ = ["examine", "remote_router"]

WORKER = Path(__file__).with_name("conformance_worker.py")

NO_OFFSET = replace(RULES["deepseek-v3"], sum_offset=0.0)
ENGINE_ROUTERS: dict[str, RouterRule] = {
    "vllm-softmax": RULES["softmax-of-chosen"],
    "vllm-softmax-raw": replace(RULES["softmax-raw"], ranked="logits"),
    "vllm-grouped-softmax": RULES["deepseek-v2"],
    "vllm-grouped-sigmoid": NO_OFFSET,
    "vllm-biased-kernel": replace(RULES["sigmoid-biased"], sum_offset=0.0),
    "mlx-qwen3_moe": RULES["softmax"],
    "mlx-olmoe": RULES["softmax-raw"],
    "mlx-mixtral": RULES["softmax-of-chosen"],
    "mlx-deepseek_v3": NO_OFFSET,
    "llama.cpp-softmax": RULES["softmax"],
    "llama.cpp-softmax-raw": RULES["softmax-raw"],
    "llama.cpp-sigmoid-biased": replace(RULES["sigmoid-biased"], sum_offset=0.0),
}
"""Routers of `conformance_worker` and what each is meant to compute."""

ONLY_SIZES = {"vllm-biased-kernel": ((64, 8), (128, 8), (256, 8), (384, 6))}
"""Sizes of routers that serve some numbers of experts alone, and refuse others by name."""


def torch_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The usual lines: softmax, topk, divide by the sum."""
    weights, ids = logits.softmax(dim=-1).topk(k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def torch_chosen(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Topk of the logits, softmax of the chosen."""
    values, ids = logits.topk(k, dim=-1)
    return values.softmax(dim=-1), ids


TORCH_ROUTERS: dict[str, tuple[Router, RouterRule]] = {
    "torch-softmax-topk": (torch_softmax, RULES["softmax"]),
    "torch-topk-softmax": (torch_chosen, RULES["softmax-of-chosen"]),
}
FAMILIES = ("mixtral", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "minimax_m2", "lfm2_moe")
"""Families of transformers that are shown; each runs on the one size of a small model."""


def remote_router(pipe: "subprocess.Popen[bytes]") -> Router:
    """Return a router that asks a worker."""

    def route(logits: Tensor, k: int, **keywords: Any) -> tuple[Tensor, Tensor]:
        fields = {"logits": logits.numpy(), "k": np.array(k)}
        fields |= {key: np.asarray(value) for key, value in keywords.items()}
        answer = _exchange(pipe, fields)
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return torch.from_numpy(answer["ids"]), torch.from_numpy(answer["weights"])

    return route


def _exchange(pipe: "subprocess.Popen[bytes]", fields: dict[str, Any]) -> dict[str, Any]:
    """Send one request and read its answer."""
    assert pipe.stdin is not None
    assert pipe.stdout is not None
    buffer = io.BytesIO()
    np.savez(buffer, **fields)
    pipe.stdin.write(struct.pack("<q", len(buffer.getvalue())) + buffer.getvalue())
    pipe.stdin.flush()
    header = pipe.stdout.read(8)
    if not header:
        raise RuntimeError(f"the worker left with code {pipe.wait()}")
    answer = np.load(io.BytesIO(pipe.stdout.read(struct.unpack("<q", header)[0])))
    return {key: answer[key] for key in answer.files}


@contextmanager
def engine_router(name: str) -> Iterator[Router]:
    """Start the worker of an engine's router; it ends with the block."""
    engine = engine_named(name.partition("-")[0])
    python = find_python(engine)
    environment = environment_of(engine, python) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    pipe = subprocess.Popen(  # noqa: S603
        [str(python), str(WORKER), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        yield remote_router(pipe)
    finally:
        if pipe.stdin is not None:
            pipe.stdin.close()
        pipe.wait()


def examine(
    router: Router, rule: RouterRule, sizes: tuple[tuple[int, int], ...] = SIZES
) -> tuple[Conformance, RouterHabits]:
    """Return verdicts over all sizes, and habits on 64 experts or the only size."""
    size = (64, 8) if (64, 8) in sizes else sizes[0]
    return check_router(router, rule, sizes), router_habits(router, rule, *size)


def transformers_router(family: str) -> tuple[Router, RouterRule, tuple[int, int]]:
    """Return the first router of a small model of a family, its rule and its size."""
    from tests.models.tiny import CHOSEN, EXPERTS, tiny_model
    from tieline.models import find_routers

    module = next(iter(find_routers(tiny_model(family)).values()))
    return *family_router(module), (EXPERTS, CHOSEN)


def results(prefixes: list[str]) -> Iterator[tuple[str, Conformance, RouterHabits]]:
    """Examine every router whose name begins with one of the prefixes."""

    def is_asked(name: str) -> bool:
        return not prefixes or any(name.startswith(prefix) for prefix in prefixes)

    for name, (router, rule) in TORCH_ROUTERS.items():
        if is_asked(name):
            yield name, *examine(router, rule)
    for family in FAMILIES:
        if is_asked(f"transformers-{family}"):
            router, rule, size = transformers_router(family)
            yield f"transformers-{family}", *examine(router, rule, (size,))
    for name, rule in ENGINE_ROUTERS.items():
        if not is_asked(name):
            continue
        try:
            with engine_router(name) as router:
                yield name, *examine(router, rule, ONLY_SIZES.get(name, SIZES))
        except TielineError as problem:
            print(f"{name}: left out: {problem}")  # noqa: T201


def table_row(name: str, conformance: Conformance, habits: RouterHabits) -> str:
    """Return one row of the table of the documentation."""
    cases = f"{len(conformance.cases) - len(conformance.deviations)} of {len(conformance.cases)}"
    cells = (
        f"`{name}`",
        cases,
        habits.ties,
        "yes" if habits.ordered else "no",
        "yes" if habits.same_bits else "no",
        habits.masked,
        habits.infinite,
        f"{habits.nan}, chosen {habits.nan_chosen:.0%}",
        _deviating_cases(conformance) or "none",
    )
    return f"| {' | '.join(cells)} |"


def _deviating_cases(conformance: Conformance) -> str:
    """Verdicts with their cases; beyond three cases their number."""
    by_verdict: dict[str, list[str]] = {}
    for case in conformance.deviations:
        names = by_verdict.setdefault(case.verdict, [])
        if case.case not in names:
            names.append(case.case)
    listed = {
        verdict: ", ".join(names) if len(names) <= 3 else f"{len(names)} kinds of cases"
        for verdict, names in by_verdict.items()
    }
    return "; ".join(f"{verdict}: {names}" for verdict, names in listed.items())


def full_text(name: str, conformance: Conformance, habits: RouterHabits) -> str:
    """Return every deviation and habit of a router."""
    return f"{name}: {conformance.explanation}\n    {habits}"


def main() -> None:
    """Examine the routers that the command line names, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("routers", nargs="*", help="beginnings of names; by default all")
    parser.add_argument("--table", action="store_true", help="print rows of the table")
    arguments = parser.parse_args()
    show: Callable[..., str] = table_row if arguments.table else full_text
    for name, conformance, habits in results(arguments.routers):
        print(show(name, conformance, habits), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
