"""upstream.py on a published wheel: its kernels run without vLLM, under the interpreter, and mean what ours mean."""

import pytest
import torch

pytest.importorskip("triton")
from dcp_fix.base.equality import close
from dcp_fix.base.errors import UserError
from dcp_fix.bench import kernel_cases
from dcp_fix.bench.upstream import Pieces
from dcp_fix.combine import merge_partials

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
RELEASE = "0.30.0"


def test_the_combine_of_a_wheel_has_our_meaning(unpacked):
    theirs = Pieces(unpacked(RELEASE)).combine()
    out, lse = torch.randn(4, 3, 8, 16), 3 * torch.randn(4, 3, 8)
    want, _ = merge_partials(out, lse)
    weighed = torch.stack([theirs.weigh(out[rank], lse, rank) for rank in range(4)]).sum(0)
    packed = [theirs.pack(out[rank], lse[rank], 4) for rank in range(4)]
    merged = [theirs.merge(torch.stack([sent[rank] for sent in packed]), 16) for rank in range(4)]
    assert close(weighed, want, ulps=8, floor=1.0) and close(torch.cat(merged, 1), want, ulps=8, floor=1.0)


def test_the_norm_of_a_wheel_is_right_by_our_reference(unpacked, monkeypatch):
    for name, value in {"QUERY": 64, "POSITIONS": 32, "TOPK": 24, "BF16": torch.float32}.items():
        monkeypatch.setattr(kernel_cases, name, value)
    case = kernel_cases.norm(3, 0.5, torch.device("cpu"), Pieces(unpacked(RELEASE)))
    assert case.error(case.contenders["upstream"](0)) <= case.allowed


def test_a_release_without_the_file_says_so(unpacked):
    with pytest.raises(UserError, match="has no vllm/v1/attention/ops/dcp.py; 0.29 and 0.30 do"):
        Pieces(unpacked("0.28.0")).combine()
