"""Tables 2 to 5: checks of the experiments that need no accelerators."""

from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import Evidence, at_least, corrected, near, none_of
from tieline.lab.claims.gate_comparisons import (
    GATE_SECONDS,
    IMAGE_GROUP,
    TEXT_GROUP,
    TEXT_PAIRS,
    higher_accuracy,
    lower_perplexity,
)
from tieline.lab.claims.paper1.tables import DECIDED_BY, DIRECTION, mean_checks

DOMAINS = (
    "needs accelerators, a pretrained ViT-S/16 and PACS at 224×224: `tieline train "
    "pacs-paper-linear-sketch`, `tieline train pacs-paper-cosine-sketch`, `tieline train "
    "pacs-paper-perturbed-sketch`, every domain; the other sets of DomainBed have no loader. "
)
SMALL_DOMAINS = (
    "Measured: the small form, `tieline train pacs-small-perturbed-sketch` and its sisters, from "
    "random weights at 32×32, 1,000 steps, three seeds, four domains: averages of 29.94 (linear), "
    "29.72 (cosine) and 29.76 % (perturbed), where a constant answer has 22.0; the perturbation "
    "gains 0.05 ± 0.35 points (docs/vision.md)"
)


@claim(
    "p2-table2",
    "language modelling with cosine routers",
    setting=DIRECTION,
    overturned_by=DECIDED_BY,
    full_seconds=8 * GATE_SECONDS,
    together=TEXT_GROUP,
)
def table_two_language(run: ClaimRun) -> Evidence:
    """The perturbed cosine router is better than the plain one on Enwik8, Text8 and WikiText-103,
    in a small and a medium model.

    Tested: Direction, in full mode: `demo-small-perturbed` against `-cosine`, bytes, 24 paired
        seeds. Order of the printed numbers, and how large the gains are.
    Undecided: not at this scale. Measured: in 48 paired runs of `demo-small` the perplexity is
        lower by 0.58 % (95 % interval 0.12 to 1.04), but by 1.45 % (0.87 to 2.02) at the first
        twelve seeds and by 0.23 % (−0.38 to 0.84) at the last 24, which were to confirm it
        (docs/ledger.md). Measured: on WikiText-103, 0.7 M parameters, 512,000 tokens, the perturbed
        router is better than the plain one at each of three seeds, by 6.7, 4.3 and 4.0 %; on
        average both are behind the linear router (docs/training.md). Enwik8 and Text8 were not
        compared. The paper's 60,000 to 80,000 steps need accelerators (it had A100): `tieline train
        enwik8-paper-cosine`, `tieline train enwik8-paper-perturbed`, `tieline train
        text8-paper-cosine`, `tieline train text8-paper-perturbed`, `tieline train
        wikitext-paper-cosine`, `tieline train wikitext-paper-perturbed`, seeds 0 to 2, at the sizes
        of paper 1
    """
    plain = (1.213, 1.161, 1.310, 1.271, 90.070, 38.018)
    perturbed = (1.197, 1.147, 1.303, 1.251, 89.910, 37.859)
    gains = [100 * (1 - b / a) for a, b in zip(plain, perturbed, strict=True)]
    return Evidence.of(
        lower_perplexity(run, "perturbed", "cosine", -gains[4], pairs=4 * TEXT_PAIRS),
        corrected(
            none_of("columns out of order", sum(gain <= 0 for gain in gains)),
            near("largest gain in percent", max(gains), 1.574, 1e-3),
            near("gain on WikiText-103, small, in percent", gains[4], 0.178, 1e-3),
        ),
        paper="better in all six",
        measured=f"by {min(gains):.2f} to {max(gains):.2f} %, no deviation printed",
    )


@claim(
    "p2-table3",
    "domain generalisation",
    overturned_by=DECIDED_BY,
    undecided="not at this scale. " + SMALL_DOMAINS + ". The paper's numbers: " + DOMAINS,
    full_seconds=150,
    together=IMAGE_GROUP,
)
def table_three_domains(run: ClaimRun) -> Evidence:
    """The perturbed cosine router averages 68.37 over five sets, the plain one 66.70, a linear one
    65.40.

    Setting: direction alone, of small models on PACS from random weights, in paired runs, as Table
        3 of paper 1; arithmetic of the printed table beside it
    Tested: Direction, in full mode and with PACS at hand: `pacs-small-perturbed` against `-cosine`
        and `-linear`, 80 steps, the average over four left-out domains, four paired seeds. Averages
        recomputed from the printed rows.
    """
    rows = {
        "linear": ((86.33, 78.15, 73.02, 41.30, 48.19), 65.40),
        "cosine": ((87.22, 78.99, 73.27, 45.55, 48.45), 66.70),
        "perturbed": ((89.36, 80.01, 74.09, 49.87, 48.51), 68.37),
    }
    return Evidence.of(
        higher_accuracy(run, "perturbed", "cosine", 1.67),
        higher_accuracy(run, "perturbed", "linear", 2.97),
        corrected(*mean_checks(rows, 0.0051)),
        corrected(near("gain over the plain cosine", 68.37 - 66.70, 1.67, 1e-9)),
        paper="+1.67",
        measured=f"half of it by TerraIncognita alone ({(49.87 - 45.55) / 5:.2f})",
    )


@claim("p2-table4", "per domain: PACS, VLCS, OfficeHome", untestable=DOMAINS + SMALL_DOMAINS)
def table_four_per_domain(run: ClaimRun) -> Evidence:
    """Accuracies per left-out domain behind the averages of Table 3.

    Setting: arithmetic of the printed table
    Tested: Averages of the domains against Table 3; in how many domains the perturbed router is at
        least as good as the plain one.
    Overturned by: runs at the paper's size
    """
    cosine = {
        "PACS, cosine": ((89.24, 86.11, 97.60, 75.92), 87.22),
        "VLCS, cosine": ((98.59, 67.42, 70.88, 79.07), 78.99),
        "OfficeHome, cosine": ((73.40, 57.27, 78.69, 83.70), 73.27),
    }
    perturbed = {
        "PACS, perturbed": ((89.87, 86.97, 97.90, 82.68), 89.36),
        "VLCS, perturbed": ((98.59, 67.80, 74.70, 78.95), 80.01),
        "OfficeHome, perturbed": ((74.64, 57.85, 79.59, 84.27), 74.09),
    }
    pairs = zip(cosine.values(), perturbed.values(), strict=True)
    better = sum(b >= a for old, new in pairs for a, b in zip(old[0], new[0], strict=True))
    return Evidence.of(
        mean_checks(cosine | perturbed, 0.011),
        at_least("domains of twelve where perturbed is at least as good", better, 11),
        paper="behind Table 3",
        measured=f"at least as good in {better} of 12",
    )


@claim("p2-table5", "per domain: DomainNet")
def table_five_domainnet(run: ClaimRun) -> Evidence:
    """Accuracies per left-out domain of DomainNet.

    Setting: arithmetic of the printed table
    Tested: Averages of the rows against Table 3.
    Overturned by: runs at the paper's size
    Untestable: needs accelerators and DomainNet, which has no loader here; the same model on PACS:
        `tieline train pacs-paper-perturbed-sketch` (docs/vision.md)
    """
    rows = {
        "linear": ((69.11, 24.95, 54.81, 16.88, 68.95, 54.41), 48.19),
        "cosine": ((68.05, 24.48, 55.75, 17.39, 69.41, 55.59), 48.45),
        "perturbed": ((68.31, 24.52, 55.03, 17.90, 69.46, 55.83), 48.51),
    }
    return Evidence.of(mean_checks(rows, 0.011), paper="behind Table 3", measured="as printed")
