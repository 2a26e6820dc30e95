"""The notebook of the five main jobs runs from its first cell to its last."""

import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


@pytest.mark.filterwarnings("ignore")  # of the notebook's own machinery
def test_the_tour_runs_on_fewer_tokens(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1] / "src")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    first = next(cell for cell in notebook.cells if "TOKENS = 2048" in cell.source)
    first.source = first.source.replace("TOKENS = 2048", "TOKENS = 128")
    repair = next(cell for cell in notebook.cells if "calibration=1024" in cell.source)
    repair.source = repair.source.replace("calibration=1024", "calibration=256")
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [out for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out]
    pages = [out["data"]["text/html"] for out in shown if "text/html" in out["data"]]
    assert len(pages) >= 5  # inspect, diff, audit, smooth and the captured trace
    assert all("<img" in page or "<svg" in page for page in pages[:4])
    assert (tmp_path / "report.html").stat().st_size > 100_000
