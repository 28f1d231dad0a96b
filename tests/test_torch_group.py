"""TorchGroup on gloo processes: the collectives of LocalGroup, the same bits, and a self-test that refuses."""

import pytest
import torch
from ranks import run_ranks

from dcp_fix.evidence import digest
from dcp_fix.group import LocalGroup
from dcp_fix.torch_group import SMALL_BYTES

pytestmark = pytest.mark.timeout(120)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool)


def value(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(shape, generator=generator)).clamp(-400, 400).to(dtype)


def every_collective(group):
    """Digests of every collective on odd shapes, strided inputs, small and large tensors, all types; and subgroups."""
    rank, size, got = group.rank, group.size, {}
    for dtype in DTYPES:
        x = value(rank, 2 * size, 3, 5 * size, dtype=dtype)
        got[f"gather {dtype}"] = [group.all_gather(x, dim) for dim in (0, 1, -1)]
        got[f"to all {dtype}"] = [group.all_to_all(x[:size].transpose(1, 2)), group.all_to_all(x[:size, :0])]
        got[f"from {dtype}"] = [group.broadcast(x.T if x.dim() == 2 else x.mT, src=size - 1)]
        if dtype.itemsize > 1:
            got[f"sum {dtype}"] = [group.all_reduce(x), group.reduce_scatter(x, 0), group.reduce_scatter(x, -1)]
    large = value(rank, SMALL_BYTES // 4 + 7)
    got["large sum"] = [group.all_reduce(large), group.all_reduce(large.bfloat16()), group.all_reduce(large[:1, None])]
    got["scalar"] = [group.all_reduce(large[3])]
    out = torch.full((size, 2), torch.nan)
    assert group.all_gather(large[None, :2], out=out) is out
    got["out"] = [out]
    for part in (1, 2, size):
        sub = group.subgroup(part)
        got[f"subgroup of {part}"] = [sub.all_gather(large[:3]), sub.all_reduce(large), torch.tensor([sub.rank])]
    got["subgroup of a subgroup"] = [group.subgroup(2).subgroup(1).all_reduce(large)]
    return {name: [(str(x.dtype), list(x.shape), digest(x)) for x in results] for name, results in got.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_gives_the_bits_of_local_group(size):
    ranks = run_ranks(size, every_collective)
    assert [rank.error for rank in ranks] == [None] * size
    assert [rank.value for rank in ranks] == LocalGroup.run(size, every_collective)
