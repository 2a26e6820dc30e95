"""Pages without script: sections of tables, drawings and notes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieline.report.drawing import inline_image
from tieline.report.frame import render
from tieline.report.tables import Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    """A panel of a page without script.

    Attributes:
        heading: its title.
        table: a table; may be None.
        draw: draws its figure; may be None.
        words: says what the figure shows, for readers who cannot see it.
        notes: sentences below.
        prose: whether the cells of the table hold sentences, which wrap.
    """

    heading: str
    table: Grid | None = None
    draw: "Callable[[], Figure] | None" = None
    words: str = ""
    notes: Sequence[str] = ()
    prose: bool = False

    @property
    def image(self) -> str:
        """Address of the figure as an image inside the page; empty without one."""
        return "" if self.draw is None else inline_image(self.draw)


def plain_page(
    kind: str, title: str, facts: str, sections: Sequence[Section], verdict: str = ""
) -> str:
    """Render a page of sections.

    Args:
        kind: what the page is, "design"; shown above its title.
        title: heading of the page.
        facts: one line below it.
        sections: panels of the page.
        verdict: the main result in a sentence; may be empty.
    """
    return render(
        "sections.html",
        style="sections.css",
        kind=kind,
        title=title,
        facts=facts,
        verdict=verdict,
        sections=sections,
    )
