"""Sentences of a check of routes."""

from tieline.analysis.check import RouteCheck


def verdict(result: RouteCheck) -> str:
    """Write whether the files are sound."""
    if not result.sound:
        count = result.count("unsound")
        return f"Unsound: {count} finding{'s' * (count != 1)} that no router of a sound run writes."
    if suspicious := result.count("suspicious"):
        return f"No proof of a fault, but {suspicious} suspicious finding{'s' * (suspicious != 1)}."
    return "No problems found."
