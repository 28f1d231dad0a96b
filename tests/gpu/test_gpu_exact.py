"""Exact mode on GPUs: one digest per step at every DCP size, with and without CUDA graphs, in threads and over NCCL."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcp_fix.bench import exact_cost
from dcp_fix.records.records import load_record
from dcp_fix.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent.parent
ON_GPU = verify.Settings(tp=8, dcp=(1, 2, 4, 8), device="cuda", combine="exact", logits=True)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("graphs", [False, True])
def test_one_digest_per_step_at_every_dcp_size(graphs):
    report = verify.as_threads(replace(ON_GPU, cuda_graphs=graphs))
    assert report.ok, [(row.dcp, row.prompt_class, row.first_token, row.ulps) for row in report.wrong]


def test_the_other_transport_gives_the_same_bits():
    reports = [verify.as_threads(replace(ON_GPU, combine=name, classes=("1536",))) for name in ("exact", "exact_ag_rs")]
    assert all(report.ok for report in reports)
    assert [row.logits for row in reports[0].rows] == [row.logits for row in reports[1].rows]


def test_the_ordinary_combine_differs():
    report = verify.as_threads(replace(ON_GPU, combine="a2a", classes=("1536",)))
    assert any(not row.logits_identical for row in report.rows)


@two_gpus
def test_two_processes_over_nccl(tmp_path):
    record = tmp_path / "r.json"
    command = [sys.executable, "-m", "dcp_fix", "verify", "--combine", "exact", "--logits", "--device", "cuda"]
    command += ["--tp", "2", "--dcp", "1,2", "--procs", "2", "--record", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert load_record(record)["results"]["transport"] == "nccl"


def test_the_benchmark_runs():
    size = exact_cost.Size(8, 8192, 16, 2048, 4, "exact", 8)
    exact, ordinary = (
        exact_cost.measure(s, torch.device("cuda")) for s in (size, replace(size, method="a2a", classes=0))
    )
    assert exact.bytes == ordinary.bytes and exact.step_ms > 0
