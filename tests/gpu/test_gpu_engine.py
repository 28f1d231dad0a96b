"""The engine on GPUs: every DCP size like DCP1, the CPU's tokens, CUDA graphs bit for bit, processes like threads."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcp_fix.base.equality import same_bytes
from dcp_fix.bench.costs import workspace_peak
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.model import Model
from dcp_fix.kv_cache import CACHE_FORMATS
from dcp_fix.ladder import ladder
from dcp_fix.ranks.group import LocalGroup, SingleGroup
from dcp_fix.records.records import load_record
from dcp_fix.tiny import corpus
from dcp_fix.verify import verify
from tests.checkpoints import random_checkpoint, random_tokens
from tests.processes import run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent.parent
ON_GPU = verify.Settings(tp=4, dcp=(1, 2, 4), device="cuda")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def bits(report):
    return [(row.dcp, row.prompt_class, row.tokens, row.logits) for row in report.rows]


@pytest.fixture(scope="module")
def plain():
    return verify.as_threads(ON_GPU)


def test_every_dcp_size_on_one_gpu(plain):
    assert plain.ok, [row for row in plain.rows if not row.same]


def test_tokens_are_those_of_the_cpu(plain):
    on_cpu = verify.as_threads(replace(ON_GPU, device="cpu", dcp=(1, 4), classes=("512", "1536")))
    tokens = {(row.dcp, row.prompt_class): row.tokens for row in plain.rows}
    assert all(tokens[row.dcp, row.prompt_class] == row.tokens for row in on_cpu.rows)


def test_a_cuda_graph_gives_the_same_bits(plain):
    graphs = verify.as_threads(replace(ON_GPU, cuda_graphs=True))
    assert graphs.ok and bits(graphs) == bits(plain)


def test_the_ladder_on_one_gpu():
    setup = ladder.load(corpus.CHECKPOINT, 4, 4, "previous", "cuda")
    rows = ladder.run(setup)
    assert ladder.repaired(rows, 1), [(row.rung, row.prompt_class, row.equal) for row in rows]


# --- graphs -----------------------------------------------------------------------------------------------------------

PROMPTS = [random_tokens(37, seed=1), random_tokens(150, seed=2), random_tokens(150, seed=2) + random_tokens(9, seed=3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model.load(random_checkpoint(tmp_path_factory.mktemp("checkpoint")), "cuda", torch.bfloat16)
    return Model(replace(model.config, eos_token_id=-1), model.weights)


def logits(model, group, static, poison=False, **options):
    engine = Engine(model, group, max_length=448, device="cuda", static_decode=static, **options)
    if poison:  # 0x7F is NaN as fp8, bf16 and fp32
        for cache in (*engine.attention.latent, *engine.attention.index):
            if cache is not None:
                cache.view(torch.uint8).fill_(0x7F)
    rows = torch.cat([engine.generate(prompt, 6).logits for prompt in PROMPTS])
    assert (engine.step is not None and engine.step.graph is not None) == static
    return rows


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_one_graph_serves_every_request_of_one_rank(model, cache_format):
    options = {"dcp_size": 1, "cache_format": cache_format}
    want = logits(model, SingleGroup(), False, **options)
    assert same_bytes(logits(model, SingleGroup(), True, poison=True, **options), want)


@pytest.mark.parametrize(
    "tp, dcp_size, interleave, combine", [(2, 2, 1, "ag_rs"), (4, 2, 16, "a2a"), (8, 8, 1, "ag_rs"), (4, 4, 1, "exact")]
)
def test_one_graph_serves_all_ranks_of_one_stream(model, tp, dcp_size, interleave, combine):
    options = {"dcp_size": dcp_size, "interleave": interleave, "combine": combine}
    want, got = (
        LocalGroup.run(tp, lambda group: logits(model, group, static, static, **options), device="cuda")  # noqa: B023
        for static in (False, True)
    )
    assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


# --- processes --------------------------------------------------------------------------------------------------------


def start_rank(settings):
    whole, _ = verify.as_process(settings)
    return whole.ok, whole.transport, bits(whole)


def test_processes_that_share_a_gpu_give_the_bits_of_threads():
    settings = replace(ON_GPU, tp=2, dcp=(1, 2), classes=("512", "1536"), share_gpus=True)
    ranks = run_processes(start_rank, [(settings,)] * 2)
    assert [rank.error for rank in ranks] == [None] * 2
    assert ranks[0].value == (True, "gloo", bits(verify.as_threads(replace(settings, share_gpus=False))))


@two_gpus
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_nccl_gives_the_bits_of_threads(cuda_graphs, tmp_path):
    command = "verify --tp 2 --dcp 1,2 --classes 512,1536 --device cuda --procs 2".split()
    command += ["--record", str(tmp_path / "r.json"), *(["--cuda-graphs"] if cuda_graphs else [])]
    done = subprocess.run([sys.executable, "-m", "dcp_fix", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = load_record(tmp_path / "r.json")["results"]
    threads = verify.as_threads(replace(ON_GPU, tp=2, dcp=(1, 2), classes=("512", "1536")))
    got = [(row["dcp"], row["prompt_class"], row["tokens"], row["logits"]) for row in results["rows"]]
    assert results["transport"] == "nccl" and got == bits(threads)


# --- workspace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_the_fix_takes_the_accumulators_away(tokens):
    row = workspace_peak(tokens, torch.device("cuda"))
    assert row["broken_peak_bytes"] - row["fixed_peak_bytes"] == pytest.approx(2 * row["fixed_planned_bytes"], rel=0.01)
