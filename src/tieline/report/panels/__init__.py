"""The charts of the page, in the order in which they are read."""

from collections.abc import Mapping
from typing import Any

from tieline.report.panels.flips import format_flips_panel, noise_flips_panel
from tieline.report.panels.gaps import gap_cdf_panel, gap_quantiles_panel
from tieline.report.panels.jumps import jump_panel, loss_panel
from tieline.report.panels.load import load_panel
from tieline.report.panels.near import near_panel
from tieline.report.panels.panel import Panel

__all__ = ["PANELS", "Panel", "draw_panels"]

PANELS = (
    gap_quantiles_panel,
    gap_cdf_panel,
    format_flips_panel,
    noise_flips_panel,
    jump_panel,
    loss_panel,
    near_panel,
    load_panel,
)


def draw_panels(result: Mapping[str, Any]) -> list[Panel]:
    """Every chart of a result, or the reason why it cannot be drawn."""
    return [draw(result) for draw in PANELS]
