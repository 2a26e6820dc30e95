"""The remedies as tables and words: every number beside what was moved and paid."""

from tieline.analysis.audit_records import Remedy, RemedyEffect, RemedyTable
from tieline.core.statistics import Estimate
from tieline.report.audit import remedies_terminal_view, remedy_grids
from tieline.report.words.audit import remedy_sentences


def kl(value):
    return Estimate(value, value / 10)


def remedy(name, kind, moved, pairs, **price):
    effects = [
        RemedyEffect(of, kl(near), kl(pair), price.get("bytes", 0)) for of, near, pair in pairs
    ]
    of = (price.get("experts", 2.0), price.get("time"), price.get("sent", 0), {}, tuple(effects))
    return Remedy(name, kind, kl(moved), *of)


TABLE = RemedyTable(
    (
        remedy("nothing", "nothing", 0.0, [("router bf16", 2e-4, 1e-4), ("noise", 3e-4, 4e-4)]),
        remedy("float32 routers", "float32", 0.0, [("router bf16", 0.0, 0.0)], bytes=16384),
        remedy("replay", "replay", 0.0, [("noise", 1e-5, 1e-6)], sent=8, time=1.012),
        remedy("smoothed", "smooth", 6e-4, [("noise", 7e-4, 2e-5)], experts=2.1, time=1.1),
    ),
    ("router bf16", "noise"),
    4096,
    "router bf16",
    ("replay: no",),
)


def test_a_row_names_what_remains_what_was_moved_and_the_price():
    (name, first), (_, second) = remedy_grids(TABLE)
    assert name == "router bf16"
    assert first.rows[0] == ("nothing", "2.0e-4 ± 2.0e-5", "1.0e-4 ± 1.0e-5", "0", "–")
    assert first.rows[1][-1] == "16,384 bytes"
    assert [row[0] for row in second.rows] == ["nothing", "replay", "smoothed"]
    assert second.rows[1][-1] == "8 B a token, 1.01 × time"
    assert second.rows[2][-2:] == ("6.0e-4 ± 6.0e-5", "2.10 experts, 1.10 × time")


def test_the_terminal_fits_eighty_columns():
    assert len(remedies_terminal_view(TABLE)) == 3 * 2 + len(remedy_sentences(TABLE)) + 1
