"""A blind protocol for the verdicts of `tieline.diff`.

Sound and faulty pairs of runs of small Mixture-of-Experts models, split into a development and a
held-out half by model family, by kind of fault and by seed (`split.json`). It was written without
the statistics of `diff`, and `HASH` records the SHA-256 of its sources; the held-out half is run
once, and any further run is marked.

    python -m benchmarks.blind --list
    python -m benchmarks.blind --half development --json OUT [--limit N --seed S]
    python -m benchmarks.blind --half held-out --json OUT

texts        documents of token ids
models       the model kinds
parts        routers, experts, attention and norms of a model
precisions   formats that a run computes in
attention    attention that can be edited
feeds        batches, padding, packing, chunks and single steps
changes      what differs between two runs
sound        sound changes
faults       faults of weights, routers and experts; context_faults, file_faults: the others
pairs        the pairs of each half
strength     which faults are too weak to be asked for, computed before `diff` runs
protocol     runs pairs and writes one line of JSON each
tables       false alarms and power
"""
