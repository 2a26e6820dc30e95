"""Output-sensitive search for the cells of a router by warm-started linear programmes (HiGHS).

In homogeneous coordinates y = (x, x_0), x_0 > 0, coalition I has a cell where a level t and a slack
s > 0 exist with z_i - t >= s for i in I and z_j - t <= -s for j not in I; s is made as large as the
box |y| <= 1 allows. The cell has a facet towards I - i + j where the same holds with z_i = z_j = t.
One programme has N rows; from one to the next only the rows of the experts that changed side are
touched, and the solver starts from its last basis.

Time grows with cells times k (N - k), whatever C(N, d + 1) is.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from tieline.errors import require
from tieline.tropical.checks import DegenerateError

__all__ = ["CellSearch"]

CUT = 1e-8
"""Slack from which a cell or facet is taken to exist."""

NONE = 1e-9
"""Slack up to which it is taken not to; HiGHS answers to 1e-10."""


class CellSearch:
    """Cells and facets of the router z = W x + b (weights of size 1)."""

    def __init__(
        self, W: Float[np.ndarray, "experts dim"], b: Float[np.ndarray, " experts"]
    ) -> None:
        try:
            import highspy
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "searching cells one by one needs HiGHS: pip install 'tieline[tropical]'"
            ) from error
        self.rows = np.column_stack([W, b])
        self.experts, self.size = self.rows.shape
        self.solver = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("presolve", "off"),
            ("primal_feasibility_tolerance", 1e-10),
            ("dual_feasibility_tolerance", 1e-10),
        ):
            self.solver.setOptionValue(option, value)
        self._build()

    def _build(self) -> None:
        """Columns y, t, s; a row z_e - t - (side) s per expert and x_0 - s >= 0; maximise s."""
        endless, size = self.solver.inf, self.size
        for _ in range(size):
            self.solver.addVar(-1.0, 1.0)
        self.solver.addVar(-endless, endless)
        self.solver.addVar(0.0, 1.0)
        self.solver.changeColCost(size + 1, -1.0)
        columns = np.arange(size + 2, dtype=np.int32)
        for row in self.rows:
            entries = np.concatenate([row, [-1.0, -1.0]])
            self.solver.addRow(0.0, endless, size + 2, columns, entries)
        last = np.array([size - 1, size + 1], dtype=np.int32)
        self.solver.addRow(0.0, endless, 2, last, np.array([1.0, -1.0]))
        self.sides = [1] * self.experts

    def _put(self, expert: int, side: int) -> None:
        """Place an expert above (1), below (-1) or at (0) the level."""
        if self.sides[expert] == side:
            return
        endless = self.solver.inf
        self.solver.changeCoeff(expert, self.size + 1, -float(side))
        self.solver.changeRowBounds(
            expert, 0.0 if side >= 0 else -endless, 0.0 if side <= 0 else endless
        )
        self.sides[expert] = side

    def slack(
        self, coalition: frozenset[int], tied: tuple[int, ...] = ()
    ) -> tuple[float, Float[np.ndarray, " d1"]]:
        """(s, y): largest slack with `coalition` above, `tied` at the level, the rest below."""
        for expert in range(self.experts):
            self._put(expert, 0 if expert in tied else 1 if expert in coalition else -1)
        self.solver.run()
        solution = np.array(self.solver.getSolution().col_value)
        return float(solution[-1]), solution[: self.size]

    def exists(self, coalition: frozenset[int], tied: tuple[int, ...] = ()) -> bool:
        """Whether the cell of `coalition`, or its facet at `tied`, has an inside."""
        slack, _ = self.slack(coalition, tied)
        require(
            not NONE < slack < CUT,
            f"coalition {sorted(coalition)} is too thin (slack {slack:.1e}) to be told from empty",
            DegenerateError,
        )
        return slack >= CUT

    def facets(self, coalition: frozenset[int]) -> Iterator[tuple[int, int]]:
        """Pairs (leaving, entering) whose wall bounds the cell."""
        outside = [e for e in range(self.experts) if e not in coalition]
        for leaving in sorted(coalition):
            for entering in outside:
                if self.exists(coalition, (leaving, entering)):
                    yield leaving, entering
