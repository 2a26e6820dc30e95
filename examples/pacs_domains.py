"""Leave one domain of PACS out: linear and cosine routers, smooth, soft and expert choice.

python examples/pacs_domains.py FOLDER [seeds] [steps]

Trains 24 small models a seed in FOLDER (240 steps by default, about 13 core-seconds each) and
prints the table; what is trained already is read again, so a run that was stopped goes on.
"""

import argparse
from pathlib import Path

from tieline.cli.progress import progress_bars
from tieline.lab.claims.gate_comparisons import domain_table, leave_one_out

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", type=Path, help="where models are kept")
parser.add_argument("seeds", type=int, nargs="?", default=3)
parser.add_argument("steps", type=int, nargs="?")
asked = parser.parse_args()
with progress_bars() as progress:
    scores = leave_one_out(
        asked.folder, seeds=range(asked.seeds), steps=asked.steps, progress=progress
    )
table = domain_table(scores)
names = list(table.commonest)
print(f"{'router':13}" + "".join(f"{name:>15}" for name in names) + "        average      gain")
for row in table.rows:
    cells = "".join(
        f"{100 * row.domains[name]:8.1f} ± {100 * row.deviations[name]:4.1f}" for name in names
    )
    average = f"{100 * row.average:7.2f} ± {100 * row.deviation:.2f}"
    print(f"{row.gate:13}{cells} {average} {100 * row.gain:+7.2f} ± {100 * row.gain_se:.2f}")
    print("  balanced   " + "".join(f"{100 * row.balanced[name]:8.1f}       " for name in names))
print(f"{'commonest':13}" + "".join(f"{100 * table.commonest[name]:8.1f}       " for name in names))
print(
    f"chance {100 * table.chance:.1f} %; {len(table.seeds)} seeds: ± s.d., gains over cosine ± s.e."
)
for run in table.at_chance:
    print("at chance:", *run)
