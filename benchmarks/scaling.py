"""Print the tables of docs/scaling.md: `python -m benchmarks.scaling`."""

from benchmarks.cost import LAPTOP, LAYOUTS, NODE, Machine, cost, errors

HEAD = "| model | read | operations | one layer | memory of a device | sent, ep | sent, tp | time |"


def table(machine: Machine) -> list[str]:
    """A row per model."""
    rows = [HEAD, "|---|---|---|---|---|---|---|---|"]
    for name, layout in LAYOUTS.items():
        price = cost(layout, machine)
        sent = [f"{n / 1e9:,.1f} GB" if n else "–" for n in (price.network, price.network_tensor)]
        sent = sent if machine.devices > 1 else ["–", "–"]
        time = f"{price.seconds / 60:,.0f} min" if price.seconds > 90 else f"{price.seconds:.0f} s"
        sizes = f"{price.bytes / 1e9:,.0f} GB | {price.operations / 1e12:,.0f} T | "
        sizes += f"{price.layer / 1e9:.1f} GB | {price.memory / 1e9:,.0f} GB"
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
