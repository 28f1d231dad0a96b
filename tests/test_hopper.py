"""The kernels compiled for sm_90, which needs no GPU: what of their code the results rest on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[1]
SHARED = 227 * 1024  # bytes that a program may take


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """{name: {"ptx", "ttir", "shared"}} of compile_kernels.py."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name, fp8", [("fp8_ds_mla", True), ("bf16", False), ("many", True)])
def test_norm_and_rope_round_as_documented(codes, name, fp8):
    """fp8 to nearest even with saturation, bf16 to nearest even, exact division and root, nothing fused."""
    ptx, ttir = codes[f"norm, {name}"]["ptx"], codes[f"norm, {name}"]["ttir"]
    conversions = len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx))
    assert conversions >= (3 if fp8 else 1)  # the index key always, the latent where the cache is fp8
    assert "cvt.rn.bf16x2.f32" in ptx and "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
    assert not re.search(r"(div\.(full|approx)|rsqrt\.approx|fma\.rn)", ptx)
    # Coalesced: the wide rows move 16 bytes per thread.
    assert len(re.findall(r"ld\.global\.v4", ptx)) >= 4 and len(re.findall(r"st\.global\.v4", ptx)) >= 4
    # Case 10: every offset is multiplied in 64 bits.
    assert set(re.findall(r"arith\.muli [^:]*: (?:tensor<\d+x)?(i\d+)", ttir)) == {"i64"}


@pytest.mark.parametrize(
    "name, warpgroup",
    [
        ("attend, fp8_ds_mla", True),
        ("attend, long", True),
        ("attend, bf16", True),
        ("attend, holes", False),
        ("leaf", True),
    ],
)
def test_attention_fits_a_multiprocessor_and_uses_its_tensor_cores(codes, name, warpgroup):
    assert codes[name]["shared"] <= SHARED
    assert ("wgmma.mma_async" in codes[name]["ptx"]) == warpgroup


@pytest.mark.parametrize("nodes", [2, 8])
def test_products_of_an_exact_merge_are_not_fused_into_sums(codes, nodes):
    """They carry .rn, which forbids it; two weights a pair."""
    ptx = codes[f"merge of {nodes}"]["ptx"]
    assert (ptx.count("div.full.f32"), ptx.count("mul.f32"), ptx.count("add.f32")) == (2 * (nodes - 1), 0, 0)
