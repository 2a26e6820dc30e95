"""Many jobs on processes of this machine."""

import os
import subprocess
import sys

import pytest

LEAK = """
import os
from tieline.lab.job_executors import run_jobs
assert sorted(run_jobs(abs, [(-1,), (-2,)], jobs=2)) == [1, 2]
assert os.environ.get("PYTHONWARNINGS") == {filters!r}
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.backend import resource_tracker
get_reusable_executor().shutdown(wait=True, kill_workers=True)
resource_tracker.register("/tieline-leaked", "semlock")
os._exit(0)  # as Ctrl-C may end a run
"""


@pytest.mark.parametrize("filters", [None, "default::ImportWarning"])
def test_what_a_stopped_run_leaves_is_removed_without_a_warning(filters):
    pytest.importorskip("joblib")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    environment |= {"PYTHONWARNINGS": filters} if filters else {}
    program = [sys.executable, "-c", LEAK.format(filters=filters)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
