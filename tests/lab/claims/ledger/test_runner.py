"""Running claims: one by one, in processes, on a Dask cluster; stopped and resumed."""

import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.lab.claims.zoo import make_claim
from tieline.core.errors import TielineError
from tieline.lab.claims.claim import ClaimRun, Verdict, select
from tieline.lab.claims.ledger import ResultStore, _claim_groups, run_claim, run_claims

RUN = ClaimRun(True, 0)
QUICK = ["p0-lem6.2", "p1-table6", "p1-eqA.7", "p1-table1"]

needs_joblib = pytest.mark.skipif(find_spec("joblib") is None, reason="joblib is not installed")
needs_dask = pytest.mark.skipif(
    find_spec("distributed") is None or find_spec("joblib") is None,
    reason="dask.distributed is not installed: pip install 'tieline[cluster]'",
)


def verdicts(outcomes):
    return [(o.claim.id, o.verdict, o.changed) for o in outcomes]


@pytest.fixture(scope="module")
def expected():
    return verdicts(run_claims(select(QUICK), RUN, executor="serial"))


def test_outcomes_come_in_the_order_of_the_claims(expected):
    assert [name for name, _, _ in expected] == QUICK
    assert not any(changed for _, _, changed in expected)


def test_claims_that_share_a_study_go_to_one_process_and_the_longest_first():
    claims = [
        make_claim("p0-a", seconds=3),
        make_claim("p0-b", seconds=2, together="study"),
        make_claim("p0-c", seconds=1),
        make_claim("p0-d", seconds=2, together="study"),
    ]
    groups = [[claim.id for claim in group] for group in _claim_groups(claims, fast=True)]
    assert groups == [["p0-b", "p0-d"], ["p0-a"], ["p0-c"]]


def test_the_full_mode_has_an_order_of_its_own():
    claims = [make_claim("p0-a", seconds=3), make_claim("p0-b", seconds=1, full_seconds=100)]
    order = [[group[0].id for group in _claim_groups(claims, fast)] for fast in (True, False)]
    assert order == [["p0-a", "p0-b"], ["p0-b", "p0-a"]]


def test_a_test_that_breaks_says_how_and_is_not_kept(tmp_path):
    def broken(run):
        raise ZeroDivisionError("nothing to divide by")

    claims = [make_claim("p0-a", test=broken), make_claim("p0-b")]
    store = ResultStore(tmp_path)
    first, second = run_claims(claims, RUN, store, executor="serial")
    assert (first.verdict, first.changed) == (None, True)
    assert first.error == "ZeroDivisionError: nothing to divide by"
    assert second.verdict is Verdict.HOLDS
    assert store.load(claims[0], RUN) is None
    assert store.load(claims[1], RUN) is not None


def test_a_test_runs_on_one_thread_and_gives_the_setting_back():
    thread_counts = []

    def count(run):
        thread_counts.append(torch.get_num_threads())
        return make_claim().test(run)

    before = torch.get_num_threads()
    run_claim(make_claim(test=count), RUN)
    assert thread_counts == [1]
    assert torch.get_num_threads() == before


def test_what_is_in_the_store_is_not_tested_again(tmp_path):
    calls, progress_calls = [], []

    def counted(run):
        calls.append(run)
        return make_claim().test(run)

    claims = [make_claim(f"p0-{name}", test=counted) for name in "abc"]
    store = ResultStore(tmp_path)
    run_claims(claims[:2], RUN, store, executor="serial")
    done = run_claims(
        claims,
        RUN,
        store,
        executor="serial",
        progress=lambda o, d, t: progress_calls.append((d, t)),
    )
    assert len(calls) == 3
    assert [o.claim.id for o in done] == ["p0-a", "p0-b", "p0-c"]
    assert progress_calls == [(1, 3), (2, 3), (3, 3)]


def test_long_claims_begin_first():
    order = []

    def noted(name):
        return lambda run: (order.append(name), make_claim().test(run))[1]

    claims = [make_claim(f"p0-{n}", test=noted(n), seconds=float(n)) for n in (1, 3, 2)]
    run_claims(claims, RUN, executor="serial")
    assert order == [3, 2, 1]


KILLED = """
import os, signal, sys
from pathlib import Path
from tieline.lab.claims import ResultStore, ClaimRun, run_claims, select
def stop(outcome, done, total):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
run_claims(select(sys.argv[2:]), ClaimRun(True, 0), ResultStore(Path(sys.argv[1])),
           executor="serial", progress=stop)
"""


def test_a_killed_run_resumes_and_loses_nothing(tmp_path, expected):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *QUICK], check=False)
    assert ended.returncode == -signal.SIGKILL
    store, claims = ResultStore(tmp_path), select(QUICK)
    stored_ids = [claim.id for claim in claims if store.load(claim, RUN) is not None]
    assert len(stored_ids) == 3
    assert not list(tmp_path.glob(".*partial"))

    def never(run):
        raise AssertionError("tested again")

    again = [replace(c, test=never) if c.id in stored_ids else c for c in claims]
    assert verdicts(run_claims(again, RUN, store, executor="serial")) == expected


@needs_joblib
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_processes_give_the_same_verdicts(expected, tmp_path):
    store = ResultStore(tmp_path)
    assert verdicts(run_claims(select(QUICK), RUN, store, executor="loky", jobs=2)) == expected
    assert len(list(tmp_path.iterdir())) == len(QUICK)


@needs_dask
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_gives_the_same_verdicts(expected, tmp_path):
    from distributed import LocalCluster

    store = ResultStore(tmp_path)
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}  # two: slow
    with LocalCluster(processes=True, **options) as cluster:
        address = cluster.scheduler_address
        done = run_claims(select(QUICK), RUN, store, executor="dask", address=address)
    assert verdicts(done) == expected
    assert len(list(tmp_path.iterdir())) == len(QUICK)


@needs_dask
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_without_an_address_a_cluster_is_made_here(expected):
    assert verdicts(run_claims(select(QUICK), RUN, executor="dask", jobs=2)) == expected


@needs_dask
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_that_does_not_answer_is_refused():
    import dask

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(TielineError, match="no Dask scheduler answers at tcp"),
    ):
        run_claims(select(QUICK), RUN, executor="dask", address="tcp://127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "threads"}, "executor must be one of loky, dask, serial"),
        ({"executor": "loky", "address": "tcp://x:1"}, "address is for executor dask"),
        ({"executor": "serial", "jobs": 0}, "jobs >= 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(TielineError, match=message):
        run_claims(select(QUICK), RUN, **options)
