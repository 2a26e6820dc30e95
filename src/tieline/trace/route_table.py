"""A file of routes with what its checks need: routed rows and layers, and hashes of rows."""

from dataclasses import dataclass

import numpy as np

from tieline.trace.readers.routes import RoutedExtent, Routes, routed_extent


@dataclass(frozen=True)
class RouteTable:
    """Routes with the quantities that every check needs.

    Attributes:
        routes: the routes.
        routed: rows and layers in which tokens were routed.
        layers: indices of the layers that are not dense.
        documents: document of each row.
        n_experts: number of experts; None if unknown.
    """

    routes: Routes
    routed: RoutedExtent
    layers: tuple[int, ...]
    documents: np.ndarray
    n_experts: int | None

    @property
    def experts(self) -> np.ndarray:
        """Expert ids (rows, layers, k)."""
        return self.routes.experts

    def routed_ids(self, layer: int) -> np.ndarray:
        """Return the expert ids (routed rows, k) of a layer."""
        mask = self.routed.mask[:, layer]
        column = self.experts[:, layer]
        return column if mask.all() else column[mask]


def route_table(routes: Routes, n_experts: int | None = None) -> RouteTable:
    """Return routes with the rows and layers in which tokens were routed."""
    stated = routes.n_experts if n_experts is None else n_experts
    extent = routed_extent(routes.experts, stated)
    layers = tuple(x for x in range(routes.experts.shape[1]) if x not in extent.dense)
    documents = routes.documents
    if documents is None:
        documents = np.zeros(len(routes.experts), np.int64)
    return RouteTable(routes, extent, layers, documents, stated)


def row_hashes(column: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash (rows,) of each row of ids (rows, k)."""
    code = np.full(len(column), 1469598103934665603, np.uint64)
    for rank in range(column.shape[1]):
        code ^= column[:, rank].astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        code *= np.uint64(1099511628211)
        code ^= code >> np.uint64(29)
    return code


def table_row_hashes(table: RouteTable) -> np.ndarray:
    """Return a 64-bit hash (rows,) of each row over all routed layers."""
    code = np.zeros(len(table.experts), np.uint64)
    for layer in table.layers:
        code = (code * np.uint64(0x9E3779B97F4A7C15)) ^ row_hashes(table.experts[:, layer])
    return code
