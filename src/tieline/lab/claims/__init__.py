"""The claims ledger: every statement of the papers as a record with a test that can fail.

claim          Claim, ClaimRun, ClaimOutcome, Verdict; how a claim is added, and the list of all
evidence       Check, Evidence; the comparisons that make checks, and the data of figures
ledger         claims tested here or on a cluster, their results on disk, and `reproduce`
paper0, ...    the claims themselves, one package per paper
"""

from tieline.lab.claims.claim import (
    PAPERS,
    Claim,
    ClaimOutcome,
    ClaimRun,
    Verdict,
    all_claims,
    select,
)
from tieline.lab.claims.evidence import Check, Evidence, Fits
from tieline.lab.claims.ledger import (
    Catalogue,
    Ledger,
    ResultStore,
    reproduce,
    run_claim,
    run_claims,
)

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
