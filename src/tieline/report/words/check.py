"""Sentences of a check of routes."""

from string import Formatter
from typing import Any, NamedTuple

from tieline.analysis.check import RouteCheck
from tieline.core.errors import TraceError, require
from tieline.core.text import layer_label
from tieline.report.words.numbers import percent
from tieline.trace.soundness import RouteFinding


class CaseText(NamedTuple):
    """Templates of a finding's sentences, filled with its count, total and evidence."""

    message: str
    where: str = ""


CHOICE_PLACE = "row {row}, {layer:layer}: {value}"
ZEROS_TEMPLATE = (
    "{{count}} of {{total}} rows are zero in every layer ({}): nothing was written there"
)
DEAD_TEMPLATE = (
    "{count} experts of {layers} layers are chosen by no token, while every other expert of their "
    "layers is by {least} or more"
)
PAIRS_TEMPLATE = ": with {pairs:list} they agree ({agreement:.2f})"

CASE_TEXTS = {
    "all-ids": CaseText("all {ids} ids are {value}: no routes were written"),
    "no-layer": CaseText("no token was routed in any of {total} layers: {layers:layers}"),
    "other-rows": CaseText(
        "{count} documents have rows that do not fit their tokens: {problem}",
        "document {document}: {rows} rows, {tokens} tokens",
    ),
    "last-token": CaseText("the last token of {count} documents has no row, as engines write it"),
    "zeros-inside": CaseText(
        ZEROS_TEMPLATE.format("{inside} of them between written rows"), "row {row}"
    ),
    "zeros-last": CaseText(ZEROS_TEMPLATE.format("each the last of its document"), "row {row}"),
    "zeros-at-ends": CaseText(ZEROS_TEMPLATE.format("at the ends of documents"), "row {row}"),
    "zeros-as-ids": CaseText("read as ids, {count} rows name expert 0 {k} times", "row {row}"),
    "dense": CaseText("{count} of {total} layers are not routed: {layers:layers}", "{layer:layer}"),
    "wrapped": CaseText(
        "{dtype} holds ids up to {limit}, the model has {experts} experts: ids wrapped round"
    ),
    "one-wide": CaseText("{layer:layer} has ids up to {top}, all others up to {second}"),
    "outside": CaseText(
        "{count} choices have an id outside 0 ... {experts} - 1, in {wrong} of {layers} layers",
        CHOICE_PLACE,
    ),
    "twice": CaseText(
        "{count} choices name an expert twice, in {wrong} of {layers} layers", CHOICE_PLACE
    ),
    "constant": CaseText(
        "{layer:layer} has {ids} in all of its {total} rows; other layers have {usual} choices or "
        "more",
        "{layer:layer}",
    ),
    "all-constant": CaseText(
        "all {total} rows are equal in {layers} routed layers: {ids} in {layer:layer}"
    ),
    "narrow": CaseText(
        "{layer:layer} uses experts 0 ... {top} alone, all other layers up to {widest}: it is "
        "unlike them",
        "{layer:layer}",
    ),
    "copies": CaseText(
        "one row stands {count} times among {total} ({share:percent}), {run} times in a row; by "
        "chance with probability 10^{log10_chance:.0f} at most under the load of the layers",
        "row {row}",
    ),
    "warm-up": CaseText(
        "one row, {ids}, fills {count} of {total} rows ({share:percent}), {run} of them in a "
        "row; by chance with probability 10^{log10_chance:.0f} at most",
        "row {row}",
    ),
    "tied-rows": CaseText(
        "{count} of {total} rows ({share:percent}) choose {ids} with equal weights of "
        "{weight:.6g}: an exact tie of all experts",
        "row {row}",
    ),
    "layer-run": CaseText(
        "{layer:layer} repeats {ids} in {count} rows that follow each other, in which every other "
        "layer changes its choice {others} times or more",
        "row {row}, {layer:layer}",
    ),
    "copied": CaseText("{count} of {total} layers have the rows of another: {pairs:layers}"),
    "not-finite": CaseText(
        "{count} of {total} choices have a weight that is no number, in {wrong} of {layers} layers",
        CHOICE_PLACE,
    ),
    "other-sums": CaseText(
        "the weights of {count} of {total} choices have another sum than nearly all of their "
        "layer, in {wrong} of {layers} layers",
        CHOICE_PLACE,
    ),
    "padding-shown": CaseText(
        "{count} of {total} documents of one length {side} with runs of token {token}, {rows} rows "
        "in all: padding that is counted as text",
        "document {document}",
    ),
    "lag": CaseText(
        "equal tokens choose alike in {shifted:percent} of pairs if rows are moved by "
        "{shift:+d}, in {unshifted:percent} as they are ({chance:percent} by chance)",
        "{layer:layer}, k={k}",
    ),
    "unrelated": CaseText(
        "rows have nothing to do with the token ids: the choices of equal tokens agree by "
        "{agreement:percent} of what is possible beyond chance, {limit:percent} at most "
        "({fitted} rows)"
    ),
    "dead": CaseText(DEAD_TEMPLATE, "{layer:layer}: {value}"),
    "dead-block": CaseText(
        DEAD_TEMPLATE + "; in all layers it is experts {first} ... {last}", "{layer:layer}: {value}"
    ),
    "other-k": CaseText("the file has {k} experts per token, the reference {expected}"),
    "other-ids": CaseText(
        "{count} of {total} token ids are not those of the reference",
        "row {row}: {ours}, in the reference {theirs}",
    ),
    "unexplained": CaseText(
        "choices agree no more than by chance (agreement {agreement:.2f}), and no order of layers, "
        "shift of rows or renumbering of experts explains it"
    ),
    "places": CaseText(
        "routed layers stand at places {places} of {total}, the model routes in {expected}"
    ),
    "odd": CaseText(
        "layers {layers} do not agree with the reference (agreement {agreement:.2f}), the others "
        "do ({others:.2f})",
        "{layer:layer}",
    ),
    "layer-count": CaseText(
        "the file has {total} routed layers, the reference {expected}" + PAIRS_TEMPLATE
    ),
    "layer-count-straight": CaseText(
        "the file has {total} routed layers, the reference {expected}: they agree as far as both "
        "go ({agreement:.2f})"
    ),
    "all-moved": CaseText("all layers are moved by {shift:+d}" + PAIRS_TEMPLATE),
    "reordered": CaseText("{count} of {total} layers stand in other places" + PAIRS_TEMPLATE),
    "moved-rows": CaseText(
        "{share:percent} of sampled rows are those of the token {shift:+d} places on"
    ),
    "exchanged-documents": CaseText(
        "{count} of {total} documents have the rows of another: {documents:list}"
    ),
    "shifted-documents": CaseText(
        "{count} of {total} documents have rows of the token {shift:+d} places on: documents "
        "{documents:list}"
    ),
    "strange-documents": CaseText(
        "{count} of {total} documents do not agree with the reference, the others do: documents "
        "{documents:list}"
    ),
    "position-drift": CaseText(
        "choices that differ from the reference grow along the positions, from {early:percent} "
        "in the first quarter to {late:percent} in the last, {ratio:.2g} times as many"
    ),
    "one-higher": CaseText(
        "ids agree with the reference once one is subtracted from each (agreement {agreement:.2f})"
    ),
    "from-one": CaseText(
        "expert 0 is chosen in none of {layers} layers, and every other one in all of them"
    ),
    "renumbered-layers": CaseText(
        "{count} of {total} layers agree with the reference once their ids are renumbered "
        "(agreement {agreement:.2f}): {layers:layers}"
    ),
    "renumbered": CaseText(
        "ids agree with the reference once they are renumbered (agreement {agreement:.2f}): they "
        "are those of physical experts"
    ),
}
"""Templates of sentences, by the case of a finding."""

DRAFT_ISSUES = "(vllm 48622, sglang 26980)"
STALE_ROW = "a stale row in padded or skipped steps (sglang 36404)"

DROP_ROWS = "drop these rows (tieline convert IN OUT --to FORM --drop warm-up)"

CAUSE_TEXTS = {
    "": "",
    "unwritten-buffer": "a fused or captured kernel that returns no choice leaves the buffer as it "
    "was made (vllm 54730, 44116): turn the fused path off, or update the engine",
    "rows-of-a-turn": "rows of a turn where those of the whole request are needed, or of several "
    "requests (strands-sglang 72)",
    "skipped-rows": "rows that a kernel, a cached prefix or a dropped step did not write; "
    "replayed, they send tokens to expert 0 (verl: placeholders read as expert 0)",
    "no-last-route": "the last token of a request has no route: leave these rows out",
    "padding": "padding, or steps of generation that returned nothing: pass the tokens to tell",
    "zeros": "zeros that stand for nothing: a replay must not take them for expert 0",
    "dense": "dense layers of the model; if the model routes there, the layer was not written. The "
    "layer axis counts all layers: consumers that count routed ones must skip these (verl 5037)",
    "small-type": "the array was written in too small a type",
    "draft-unsure": f"a draft model wrote into the layer {DRAFT_ISSUES}; pass n_experts to be sure",
    "mixed-rows": "some ids of a token are -1 and others are not: rows of two arrays were mixed",
    "physical-ids": "ids of physical experts after load balancing (EPLB), which counts redundant "
    "copies: map them to logical ones before they leave the engine",
    "from-one": "ids that count from 1: subtract 1 from each",
    "draft-layers": "{wrong} of {layers} layers: a draft model, or another head, wrote into them "
    + DRAFT_ISSUES,
    "other-model": "another model's routes, or an array of another type read as this one",
    "placeholders": "zeros that stand for nothing, read as expert 0 (verl: placeholders)",
    "one-layer": "one layer alone: another head or a draft model wrote into it",
    "mixed-or-cast": "rows of two tokens or arrays were mixed, or ids were cast to too small a "
    "type",
    "torn-rows": "weights of other rows or of another type, or a buffer that was not written",
    "written-once": "a buffer that was written once, or a layer that another program filled",
    "narrow-draft": f"a draft model with fewer experts wrote into it {DRAFT_ISSUES}",
    "stale-row": STALE_ROW,
    "stale-row-or-token": f"{STALE_ROW}; or a token that is repeated: pass the tokens to tell",
    "warm-up": f"a profiling run, which feeds one dummy token (vLLM at its start): {DROP_ROWS}",
    "dummy-rows": f"padded steps, a profiling run, or a token that is repeated: {DROP_ROWS}",
    "zero-input": "the input of the router was zero: a profiling run, padding, or memory that "
    f"nothing was written to: {DROP_ROWS}",
    "stale-layer": "a buffer of this layer that was not written in these steps: leave the rows out",
    "layer-index": "layers were written under the wrong index, or one buffer serves several",
    "mask-of-ones": "an attention mask of ones over padding: pass the true mask, and drop these "
    "rows; with padding first, the other rows saw it too and are to be made anew",
    "neighbouring-rows": "row t belongs to token t{lag:+d}: rows of the token before or after, or "
    "of another request that begins elsewhere (miles 3277)",
    "other-token-ids": "token ids of another text or tokenizer, or rows in another order: pass the "
    "ids that the engine routed",
    "other-ids": "another text or tokenizer, or documents in another order: routes are compared "
    "only where the token ids agree",
    "position-tables": "another rope base or scaling, or positions counted otherwise: compare the "
    "rotary settings of both sides",
    "lost-rank": "choices of one expert-parallel rank are lost",
    "left-behind": "experts that training left behind, or a text that does not reach them",
    "other-shape": "another model, or an array in another shape: is the last axis k?",
    "other-tokens": "rows of other tokens, an older model, or another one (miles 3277)",
    "dense-shift": "dense layers shift later ones (verl 5037)",
    "draft": f"a draft model or another head wrote into them {DRAFT_ISSUES}",
    "dense-on-one-side": "dense layers counted on one side only (verl 5037), or layers that are "
    "missing",
    "list-order": "layers in the order of a list or of building, not of depth (miles 2570; verl "
    "7805)",
    "cut-prompt": "rows of the token before or after, of a prompt that was cut, or from a request "
    "that began anew (miles 3277): align them by position",
    "exchanged-requests": "answers were assigned to other requests, as where they come in order "
    "of completion: assign the rows by request id, or drop these documents",
    "strange-requests": "rows of requests that are not in the file, or of other tokens: drop these "
    "documents",
    "load-balancing": "expert load balancing (EPLB): map physical ids to logical ones",
}
"""Templates of likely causes, by the reason of a finding."""


ROUTE_CHECKS = (
    "ids in range, no expert twice in a token, rows that were never written, repeated rows, "
    "constant and copied layers, weights, dead experts"
)
ID_CHECKS = "number of rows and shift of rows against the token ids"
CHOICE_CHECKS = "the choices themselves (order of layers, numbering of experts)"
"""What `check` looks for in routes alone, with token ids, and with a model or a second file."""


class _FindingTemplate(Formatter):
    """Templates whose values may have the formats "list", "layers", "layer" and "percent"."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a value in one of these formats, or in a standard one."""
        if format_spec == "list":
            return ", ".join(value)
        if format_spec == "layers":
            return ", ".join(" = ".join(map(layer_label, item.split(" = "))) for item in value)
        if format_spec == "layer":
            return layer_label(str(value)) if isinstance(value, str) else f"layer {value}"
        if format_spec == "percent":
            return percent(value, 3, trim=True)
        return super().format_field(value, format_spec)


def route_finding_message(finding: RouteFinding) -> str:
    """Write what a finding is, with its numbers."""
    return _filled_finding_template(_finding_case_text(finding).message, finding)


def route_finding_place(finding: RouteFinding) -> str:
    """Write the first place of a finding and the values there."""
    return _filled_finding_template(_finding_case_text(finding).where, finding)


def route_finding_cause(finding: RouteFinding) -> str:
    """Write the likely cause of a finding, and what to do."""
    return _filled_finding_template(CAUSE_TEXTS.get(finding.reason, ""), finding)


def _filled_finding_template(template: str, finding: RouteFinding) -> str:
    """Return a template filled with the evidence of a finding; raises if any is missing."""
    values = {**finding.evidence, "count": finding.count, "total": finding.total}
    try:
        return _FindingTemplate().vformat(template, (), values)
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        raise TraceError(f"the evidence of a finding {finding.case!r:.40} is damaged") from problem


def _finding_case_text(finding: RouteFinding) -> CaseText:
    """Return the templates of a finding's case; raises if a damaged file names an unknown one."""
    require(finding.case in CASE_TEXTS, f"no finding is called {finding.case!r:.40}", TraceError)
    return CASE_TEXTS[finding.case]


def check_verdict(result: RouteCheck) -> str:
    """Write whether the files are sound."""
    if not result.sound:
        count = result.count("unsound")
        return f"Unsound: {count} finding{'s' * (count != 1)} that no router of a sound run writes."
    if suspicious := result.count("suspicious"):
        return f"No proof of a fault, but {suspicious} suspicious finding{'s' * (suspicious != 1)}."
    return "No problems found."


def checks_sentences(result: RouteCheck) -> list[str]:
    """Write what was checked, and what was not for lack of tokens, a model or a second file.

    Empty if the files hold no routes, since no other check runs then.
    """
    if any(finding.case in ("all-ids", "no-layer") for finding in result.findings):
        return []
    checked, unchecked = [ROUTE_CHECKS], []
    with_tokens = sum(file.has_tokens for file in result.files)
    where = "" if with_tokens in (0, len(result.files)) else f" of {with_tokens} files"
    if with_tokens:
        checked.append(f"{ID_CHECKS}{where}")
    if with_tokens < len(result.files):
        unchecked.append(f"{ID_CHECKS} (`--ids FILE`)")
    model = None if result.model is None else f"the model {result.model}"
    if references := list(filter(None, (model, result.reference))):
        checked.append(f"{CHOICE_CHECKS} against {' and '.join(references)}")
    else:
        unchecked.append(
            f"{CHOICE_CHECKS} against a model or a second run (`--model MODEL` or `--against FILE`)"
        )
    sentences = [f"Checked: {'; '.join(checked)}."]
    return sentences + [f"Not checked: {'; '.join(unchecked)}."] * bool(unchecked)
