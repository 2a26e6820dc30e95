"""Routers of installed engines deviate where the documentation says, and nowhere else."""

import os

import pytest

from tieline.core.errors import TielineError
from tieline.engines.engine_registry import engine_named, find_python
from tools.conformance import ENGINE_ROUTERS, ONLY_SIZES, TORCH_ROUTERS, engine_router, examine

SIZES = ((16, 1), (16, 4), (64, 8))
DEVIATIONS = {
    "vllm-softmax-raw": {("negative", "wrong weights")},
    "vllm-grouped-softmax": {("no-rows", "raised")},
    "vllm-grouped-sigmoid": {("no-rows", "raised")},
    "llama.cpp-sigmoid-biased": {("negative", "wrong weights"), ("equal", "wrong weights")},
}


@pytest.mark.parametrize("name", sorted(ENGINE_ROUTERS))
@pytest.mark.skipif(
    not os.environ.get("TIELINE_TEST_ENGINES"),
    reason="set TIELINE_TEST_ENGINES=1 (make test-engines)",
)
def test_an_engine_deviates_where_the_documentation_says(name):
    try:
        find_python(engine_named(name.partition("-")[0]))
    except TielineError as problem:
        pytest.skip(str(problem))
    with engine_router(name) as router:
        sizes = ONLY_SIZES.get(name, SIZES)
        conformance, _ = examine(router, ENGINE_ROUTERS[name], sizes)
    deviations = {(case.case, case.verdict) for case in conformance.deviations}
    if name == "mlx-deepseek_v3":
        assert {case.k for case in conformance.deviations if case.case != "negative"} == {1}
        assert {verdict for _, verdict in deviations} == {"wrong weights"}
    else:
        assert deviations == DEVIATIONS.get(name, set())


@pytest.mark.parametrize("name", sorted(TORCH_ROUTERS))
def test_torch_conforms(name):
    conformance, habits = examine(*TORCH_ROUTERS[name], SIZES)
    assert conformance.conforms
    assert habits.ties == "neither"
