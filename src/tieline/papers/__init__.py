"""The claims ledger: every statement of the papers as a record with a test that can fail.

claim          Verdict, Check, Evidence, Claim, Outcome: what a claim is and how it is judged
checks         comparisons that give checks
registry       the claims of all papers, and how one is added
fingerprint    which code a result belongs to
store          results on disk, one file per claim
runner         many claims at once, on this machine or on a cluster
figure         the data of a figure, as plain dictionaries
paper0, ...    the claims themselves, one package per paper
"""

from tieline.papers.claim import Check, Claim, Evidence, Outcome, Run, Verdict
from tieline.papers.registry import PAPERS, all_claims, select
from tieline.papers.runner import ResultStore, run_claim, run_claims

__all__ = [
    "PAPERS",
    "Check",
    "Claim",
    "Evidence",
    "Outcome",
    "ResultStore",
    "Run",
    "Verdict",
    "all_claims",
    "run_claim",
    "run_claims",
    "select",
]
