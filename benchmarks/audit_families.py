"""The audit table of six models: the one in the box, and small random ones of five families.

python -m benchmarks.audit_families [--tokens 4096] [--models demo,mixtral] [--json FILE]

The random models have 4 layers, 16 experts, 4 of them chosen, and scores of order one; their text
is that of the box, in the tokens of the model in the box.
"""

import argparse
import json
from pathlib import Path

from benchmarks.diff_families import LENGTH, random_model
from benchmarks.planted import SHOWN
from tieline.analysis.audit import audit
from tieline.models.demo import demo_text
from tieline.models.model import Model
from tieline.report.audit import COLUMNS


def audited(name, tokens):
    """The audit of one model."""
    loaded = Model.open(dtype="fp32")
    model = loaded.module if name == "demo" else random_model(name)
    length = None if name == "demo" else LENGTH
    source = (model, loaded.tokenizer)
    return audit(source, text=demo_text(), tokens=tokens, sequence_length=length, remedies=())


def show(name, result):
    """Print the table of one model, in Markdown."""
    loss, total = result.loss.value, result.timings["total"]
    print(f"\n### {name}: {result.tokens:,} tokens, {total:.0f} s, loss {loss:.3f} nats\n")
    print(result.verdict + "\n")
    print("| " + " | ".join(column.heading for column in COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for row in result.effects:
        print("| " + " | ".join(column.cell(row) for column in COLUMNS) + " |")
    for row in result.effects:
        if row.kind == "score noise":
            off = 100 * (row.predicted / row.local.value - 1)
            low = 100 * (row.predicted_low / row.local.value - 1)
            print(f"\n{row.name}: {row.local_flips:,} flips, predicted {low:+.2f} to {off:+.2f} %")
    print(f"\nσ of 1 % flips: {result.one_percent.model}; never hit: {result.never_hit}")


def main():
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--models", default=",".join(["demo", *SHOWN]))
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    rows = {}
    for name in options.models.split(","):
        result = audited(name, options.tokens)
        show(name, result)
        rows[name] = result.to_dict()
    if options.json is not None:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
