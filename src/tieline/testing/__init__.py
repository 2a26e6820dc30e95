"""Conformance tests for routing kernels: does a function choose experts by its rule?

    RouterRule       how a router ranks and weights experts: the reference, in float64
    RULES            rules by name ("softmax", "sigmoid", "deepseek-v3", ...)
    logit_cases      the test cases: logits that break kernels, from equal scores to NaN
    check_router     run a router on all cases; one verdict per case
    assert_router    the same as an assertion that lists every deviation
    router_habits    behaviour where no answer is right: ties, NaN, masked rows
    family_router    a router module of transformers as a function, with its rule

As a plug-in of pytest, which is part of the package:

    pytest --tieline-router my.module:function --tieline-rule softmax

A choice counts as wrong only if no tie explains it, and weights are compared for the experts that
the router itself chose.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tieline.testing.conformance import (
        Conformance,
        LogitCase,
        RouterHabits,
        assert_router,
        check_router,
        logit_cases,
        router_habits,
    )
    from tieline.testing.reference_rules import RULES, RouterRule, rule_named
    from tieline.testing.transformers_router import family_router

__all__ = [
    "RULES",
    "Conformance",
    "LogitCase",
    "RouterHabits",
    "RouterRule",
    "assert_router",
    "check_router",
    "family_router",
    "logit_cases",
    "router_habits",
    "rule_named",
]

MODULES = {
    **dict.fromkeys(("RULES", "RouterRule", "rule_named"), "reference_rules"),
    "family_router": "transformers_router",
}
"""Modules of the names that are not in `conformance`."""


def __getattr__(name: str) -> Any:  # on first use: pytest loads the plug-in in every run
    if name in __all__:
        module = MODULES.get(name, "conformance")
        return getattr(import_module(f"tieline.testing.{module}"), name)
    raise AttributeError(f"module 'tieline.testing' has no attribute {name!r}")
