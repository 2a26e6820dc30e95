"""The claims ledger: every statement of the papers as a record with a test that can fail.

claim          Claim, Check, Evidence, Verdict, ClaimOutcome
checks         the comparisons that make checks
registry       the claims of all papers, and how one is added
runner         tests of many claims, on this machine or on a cluster; results on disk
ledger         the record of all outcomes, and `reproduce`
paper0, ...    the claims themselves, one package per paper
"""

from tieline.lab.claims.claim import Check, Claim, ClaimOutcome, ClaimRun, Evidence, Fits, Verdict
from tieline.lab.claims.ledger import Catalogue, Ledger, reproduce
from tieline.lab.claims.registry import PAPERS, all_claims, select
from tieline.lab.claims.runner import ResultStore, run_claim, run_claims

__all__ = [
    "PAPERS",
    "Catalogue",
    "Check",
    "Claim",
    "ClaimOutcome",
    "ClaimRun",
    "Evidence",
    "Fits",
    "Ledger",
    "ResultStore",
    "Verdict",
    "all_claims",
    "reproduce",
    "run_claim",
    "run_claims",
    "select",
]
