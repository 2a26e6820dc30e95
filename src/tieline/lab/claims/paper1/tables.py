"""Tables 1 to 8: checks that run here, small-scale results, and commands for the rest.

For tables of language modelling and of DomainBed the direction is tested at the sizes of
`gate_comparisons`; the reason gives results of larger runs and the commands for the paper's own.
The others need accelerators. Every command runs as it stands, also with `--dry-run`.
"""

import math
from collections.abc import Mapping, Sequence

from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import Check, Evidence, at_least, at_most, corrected, near, none_of
from tieline.lab.claims.gate_comparisons import (
    GATE_SECONDS,
    IMAGE_GROUP,
    TEXT_GROUP,
    higher_accuracy,
    lower_perplexity,
)

DIRECTION = (
    "direction alone, of small models in paired runs; arithmetic of the printed table beside it"
)
DECIDED_BY = "an interval of paired runs on one side of zero; runs at the paper's size"


def mean_checks(rows: Mapping[str, tuple[Sequence[float], float]], digits: float) -> list[Check]:
    """Check printed averages against the means of their rows, to the printed digits."""
    return [
        near(f"average of {name}", sum(values) / len(values), printed, digits)
        for name, (values, printed) in rows.items()
    ]


def gain_in_errors(low: tuple[float, float], high: tuple[float, float], seeds: int) -> float:
    """Difference of two printed means in standard errors, from the printed deviations."""
    return (high[0] - low[0]) / math.sqrt((low[1] ** 2 + high[1] ** 2) / seeds)


def undecided_at_small_scale(measured: str, *recipes: str) -> str:
    """Reason why the direction of a table is not decided, and commands to test its numbers.

    `measured` is the small-scale result of docs/training.md, `recipes` name the paper's form.
    """
    commands = ", ".join(f"`tieline train {recipe}`" for recipe in recipes)
    return (
        f"not at this scale. Measured: {measured} (docs/training.md). The paper's 80 epochs need "
        f"accelerators (it had two H100): {commands}, seeds 0 to 2"
    )


@claim(
    "p1-table1",
    "perplexity on WikiText-103",
    setting=DIRECTION,
    overturned_by=DECIDED_BY,
    undecided=undecided_at_small_scale(
        "smooth50 changes the test perplexity by +0.39 % (95 % interval −7.5 to +8.3) after "
        "512,000 tokens and by +0.41 % (−2.8 to +3.6) after 1.54 M, three paired seeds, far from "
        "the paper's gain; AAA for 2.5 % of words raises it by +31.1 %, that of smoe by +30.8 %",
        "wikitext-paper-smoe",
        "wikitext-paper-remoe",
        "wikitext-paper-smooth50",
    ),
    full_seconds=2 * GATE_SECONDS,
    together=TEXT_GROUP,
)
def table_one_wikitext(run: ClaimRun) -> Evidence:
    """SmoothSMoE lowers perplexity from 33.79/35.52 to 32.72/34.35, and on attacked text from
    42.21/44.18 to 40.99/42.85.

    Tested: Direction, in full mode: `demo-small-smooth50` and `-smoe`, six paired seeds, test split
        and the split attacked by AAA for 2.5 % of words. The differences that the text states, from
        the table; their size in its own standard errors over three seeds.
    """
    gain = gain_in_errors((34.35, 0.22), (35.52, 0.13), 3)
    return Evidence.of(
        lower_perplexity(run, "smooth50", "smoe", -3.29),
        lower_perplexity(run, "smooth50", "smoe", -3.01, attacked=True),
        corrected(
            near("gain on validation", 33.79 - 32.72, 1.07, 1e-9),
            near("gain on test", 35.52 - 34.35, 1.17, 1e-9),
            at_least("gain on test in standard errors", gain, 3),
        ),
        paper="-3.3 % in test perplexity",
        measured=f"{gain:.1f} of its own standard errors",
    )


@claim("p1-table2", "GLUE")
def table_two_glue(run: ClaimRun) -> Evidence:
    """SmoothSMoE is best on average on five GLUE tasks, by 0.47 (k = 2) and 0.57 (k = 4) over the
    next.

    Setting: arithmetic of the printed table
    Tested: Averages and gains recomputed from the printed rows; the spread of the tasks beside
        them.
    Overturned by: runs at the paper's size
    Untestable: needs accelerators, BERT-large and GLUE: `tieline train
        glue-paper-cola-smooth50-k2`, `tieline train glue-paper-cola-smoe-k2`, `tieline train
        glue-paper-cola-remoe-k2`, likewise mrpc and rte, and k4, five seeds each; MNLI and QNLI
        have no loader. `tieline train glue-smoke-cola-smoe` shows that all of it runs; from random
        weights it ends at guessing (docs/vision.md)
    """
    rows = {
        "SMoE, k = 2": ((73.28, 89.17, 64.25, 92.56, 86.60), 81.17),
        "SmoothSMoE, k = 2": ((73.40, 90.15, 65.41, 92.40, 86.90), 81.65),
        "SMoE, k = 4": ((73.85, 89.26, 63.90, 92.20, 86.49), 81.14),
        "ReMoE, k = 4": ((72.20, 89.49, 65.07, 92.51, 86.51), 81.16),
        "SmoothSMoE, k = 4": ((74.60, 89.88, 64.82, 92.53, 86.82), 81.73),
    }
    remoe = (73.10, 88.60, 64.9, 92.53, 86.69)
    error = math.sqrt(sum(s**2 for s in (0.85, 0.60, 0.39, 0.12, 0.20)) / 5) / 5
    return Evidence.of(
        mean_checks(rows, 0.0051),
        corrected(near("average of ReMoE, k = 2, printed as 81.18", sum(remoe) / 5, 81.164, 1e-9)),
        near("gain, k = 2", 81.65 - 81.18, 0.47, 1e-9),
        near("gain, k = 4", 81.73 - 81.16, 0.57, 1e-9),
        paper="+0.47, +0.57",
        corrected="+0.48: ReMoE's row averages 81.164, not 81.18",
        measured=f"+0.47 ± {error * math.sqrt(2):.2f}",
    )


@claim("p1-table3", "DomainBed", overturned_by=DECIDED_BY, full_seconds=300, together=IMAGE_GROUP)
def table_three_domainbed(run: ClaimRun) -> Evidence:
    """SmoothGMoE is best on average: 0.56 above GMoE (2.1 on TerraInc), and above Soft MoE and
    expert choice.

    Setting: direction alone, of small models on PACS from random weights, in paired runs;
        arithmetic of the printed table beside it
    Tested: Direction, in full mode and with PACS at hand: `pacs-small-smooth` against `-cosine`,
        `-soft` and `-expert-choice`, 80 steps from random weights, the average over four left-out
        domains, four paired seeds. Averages recomputed from the printed rows: SmoothGMoE's is
        67.452, printed as 67.4, and the gain over GMoE 0.61.
    Undecided: not at this scale. Measured: PACS at 32×32, 1,000 steps from random weights, three
        paired seeds: smooth 30.24 % on average, 0.82 points above cosine (95 % interval −0.90 to
        +2.53), 0.18 above soft (−5.89 to +6.25), 0.42 above expert choice (−2.96 to +3.80)
        (docs/vision.md). The paper's numbers need accelerators, a pretrained ViT-S/16 and PACS at
        224×224: `tieline train pacs-paper-smooth-sketch`, `tieline train pacs-paper-cosine-sketch`,
        `tieline train pacs-paper-soft-sketch`, `tieline train pacs-paper-expert-choice-sketch`,
        every domain, five seeds each; the other four sets have no loader
    """
    rows = {
        "GMoE": ((87.7, 79.6, 73.1, 45.4, 48.4), 66.84),
        "SoftMoE": ((86.6, 78.9, 69.1, 46.4, 47.3), 65.66),
        "Expert choice": ((86.6, 79.4, 73.3, 46.0, 48.4), 66.74),
    }
    smooth = (87.6 + 79.9 + 73.46 + 47.5 + 48.8) / 5
    return Evidence.of(
        higher_accuracy(run, "smooth", "cosine", 0.56),
        higher_accuracy(run, "smooth", "soft", 1.74),
        higher_accuracy(run, "smooth", "expert-choice", 0.66),
        corrected(*mean_checks(rows, 0.0051)),
        corrected(
            near("average of SmoothGMoE, one digit cut off", smooth, 67.4, 0.06),
            near("gain on TerraInc", 47.5 - 45.4, 2.1, 1e-9),
        ),
        paper=67.4,
        corrected=smooth,
        measured=f"gain {smooth - 66.84:.3f} by the rows, 0.56 printed",
    )


@claim(
    "p1-table4",
    "annealed smoothing",
    setting=DIRECTION,
    overturned_by=DECIDED_BY,
    undecided=undecided_at_small_scale(
        "scored with hard top-2, annealed changes the test perplexity by +0.65 % (95 % interval "
        "−7.2 to +8.5) against smoe and smooth50 by +0.39 % (−7.5 to +8.3), 512,000 tokens, three "
        "paired seeds: no order can be told",
        "wikitext-paper-smoe",
        "wikitext-paper-annealed",
        "wikitext-paper-smooth50",
    ),
    full_seconds=GATE_SECONDS,
    together=TEXT_GROUP,
)
def table_four_annealed(run: ClaimRun) -> Evidence:
    """Annealed to hard top-2, the model reaches 34.59 (text) on the test set, between SMoE and
    SmoothSMoE.

    Tested: Direction, in full mode: `demo-small-annealed` scored with hard top-2 against `-smoe`,
        and `-smooth50` against it, six paired seeds. Order of the printed rows; the number of the
        text against the table, which has 34.62.
    """
    rows = (
        (33.79, 33.17, 32.72),
        (35.52, 34.62, 34.35),
        (42.21, 41.62, 40.99),
        (44.18, 43.18, 42.85),
    )
    return Evidence.of(
        lower_perplexity(run, "annealed", "smoe", -2.53),
        lower_perplexity(run, "smooth50", "annealed", -0.78),
        corrected(
            none_of("columns out of order", sum(not a > b > c for a, b, c in rows)),
            near("text and table", 34.59, 34.62, 0.031),
        ),
        paper="34.59",
        corrected="34.62 in the table",
        measured="differs by 0.03",
    )


@claim("p1-table5", "vision-language model")
def table_five_vision_language(run: ClaimRun) -> Evidence:
    """On a 5.6B model SmoothSMoE averages 55.07 and its annealed form 54.98, against 54.53.

    Setting: arithmetic of the printed table
    Tested: Averages recomputed from the printed rows, and on how many benchmarks each wins.
    Overturned by: runs at the paper's size
    Untestable: needs accelerators, a vision-language model of 5.6B and LLaVA-665K: `tieline upcycle
        BACKBONE --out MIXTURE --n-experts 4 -k 2` makes the mixture, `tieline smooth MIXTURE
        --out SMOOTH` its smooth form; the fine-tuning and the benchmarks have no recipe
    """
    hard = (65.48, 60.41, 70.96, 40.18, 67.78, 42.67, 40.95, 32.7, 84.42, 39.78)
    smooth = (66.06, 60.33, 69.42, 40.85, 70.93, 42.11, 41.98, 33.0, 84.92, 41.08)
    annealed = (65.32, 59.75, 71.13, 41.16, 69.25, 42.44, 42.64, 32.5, 84.54, 41.04)
    wins = sum(a > b for a, b in zip(smooth, hard, strict=True))
    rows = {"SMoE": (hard, 54.53), "SmoothSMoE": (smooth, 55.07), "annealed": (annealed, 54.98)}
    checks = [*mean_checks(rows, 0.0051), at_least("benchmarks won by SmoothSMoE", wins, 6)]
    return Evidence.of(checks, paper="+0.54", measured=f"wins on {wins} of 10, one seed")


@claim(
    "p1-table6",
    "bits per character on EnWiki-8",
    setting=DIRECTION,
    overturned_by=DECIDED_BY,
    undecided=undecided_at_small_scale(
        "0.7 M parameters after 4.1 M bytes, six paired seeds (enwik8-extended): perplexity of the "
        "test split lower by 1.07 % with smooth50 (0.22 to 1.92 %), three of the seeds added after "
        "a look at the first; 10 M parameters after 1.02 M bytes, one seed: 2.610 ± 0.035 bits "
        "with smooth50, 2.600 ± 0.034 with smoe",
        "enwik8-paper-smoe",
        "enwik8-paper-smooth50",
    ),
    together=TEXT_GROUP,
)
def table_six_enwik8(run: ClaimRun) -> Evidence:
    """SmoothSMoE reaches 1.122 bits per character against 1.153.

    Tested: Direction, in full mode: `demo-small-smooth50` against `-smoe`, bytes, six paired seeds.
        The relative gain from the table, which prints no deviation.
    """
    checks = [
        lower_perplexity(run, "smooth50", "smoe", -2.13),
        *corrected(near("relative gain", 1 - 1.122 / 1.153, 0.0269, 1e-4)),
    ]
    return Evidence.of(checks, paper="-2.7 %", measured="no standard error is printed")


@claim(
    "p1-table8",
    "is it only the extra expert?",
    setting=DIRECTION,
    overturned_by=DECIDED_BY,
    undecided=undecided_at_small_scale(
        "with k = 2, top3 changes the test perplexity by −6.02 % (95 % interval −19.6 to +7.6) and "
        "smooth50 by +0.39 % (−7.5 to +8.3) against top-2, 512,000 tokens; the whole further "
        "expert is ahead at two of three seeds, other than in the paper",
        "wikitext-paper-smoe-k4",
        "wikitext-paper-smoe-k5",
        "wikitext-paper-smooth50-k4",
    ),
    full_seconds=3 * GATE_SECONDS,
    together=TEXT_GROUP,
)
def table_eight_extra_expert(run: ClaimRun) -> Evidence:
    """SmoothSMoE with k = 4.5 has lower perplexity than hard top-4 and top-5.

    Tested: Direction, in full mode: `demo-small-smooth50` with k* = 4.5 against top-4 and top-5,
        six paired seeds. Order of the printed rows, and the gain over top-5 in the table's own
        standard errors.
    """
    valid = gain_in_errors((31.97, 0.13), (32.35, 0.16), 3)
    test = gain_in_errors((33.30, 0.07), (33.41, 0.09), 3)
    return Evidence.of(
        lower_perplexity(run, "smooth50-k4", "smoe-k4", -2.4),
        lower_perplexity(run, "smooth50-k4", "smoe-k5", -0.33),
        corrected(
            at_least("gain over top-5 on validation", 32.35 - 31.97, 0),
            at_least("gain over top-5 on test", 33.41 - 33.30, 0),
            at_most("gain over top-5 on test in standard errors", test, 2),
        ),
        paper="lower than both",
        corrected="on the test set not beyond two standard errors",
        measured=f"{valid:.1f} (validation) and {test:.1f} (test) standard errors",
    )
