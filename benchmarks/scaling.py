"""Print the tables of docs/scaling.md: `python -m benchmarks.scaling`."""

from benchmarks.cost import LAPTOP, LAYOUTS, NODE, Machine, cost, errors

HEAD = "| model | read | operations | one layer | memory of a device | sent, ep | sent, tp | time |"


def table(machine: Machine) -> list[str]:
    """A row per model."""
    rows = [HEAD, "|---|---|---|---|---|---|---|---|"]
    for name, layout in LAYOUTS.items():
        one = cost(layout, machine)
        sent = [f"{n / 1e9:,.1f} GB" if n else "–" for n in (one.network, one.network_tensor)]
        sent = sent if machine.devices > 1 else ["–", "–"]
        time = f"{one.seconds / 60:,.0f} min" if one.seconds > 90 else f"{one.seconds:.0f} s"
        sizes = f"{one.bytes / 1e9:,.0f} GB | {one.operations / 1e12:,.0f} T | "
        sizes += f"{one.layer / 1e9:.1f} GB | {one.memory / 1e9:,.0f} GB"
        rows.append(f"| {name} | {sizes} | {sent[0]} | {sent[1]} | {time} |")
    return rows


def main() -> None:
    """Print both tables and the errors."""
    print("\n".join(table(LAPTOP)), end="\n\n")
    print("\n".join(table(NODE)), end="\n\n")
    print("| quantity | error |\n|---|---|")
    for name, error in errors().items():
        print(f"| {name} | {error:+.1%} |")


if __name__ == "__main__":
    main()
