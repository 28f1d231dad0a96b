"""exact/kernel.py: under the interpreter against the reference, and on a GPU bit for bit over D."""

import pytest
import torch

from dcp_fix import exact
from dcp_fix.base.equality import close, same_bytes
from dcp_fix.kv_cache import CACHE_FORMATS, new_latent_cache, write_latent
from dcp_fix.ownership import local_class, localise

triton = pytest.importorskip("triton")
from dcp_fix.exact.kernel import leaf_partials_triton, merge_tree_triton, pack_classes  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ULPS = 32 if DEVICE == "cpu" else 128  # a GPU approximates exp2 and log2
CLASSES, SCALE, NAN = 8, 0.07, float("nan")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),  # numpy, in the interpreter
]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen(tokens, length, topk, seed=1):
    """Ascending ids [T, K]; token 1 has few, token 2 none."""
    order = torch.rand(tokens, length, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :topk].sort(1)[0]
    order[1:2, 3:], order[2:3] = -1, -1
    return order


def leaves_of(length, classes, size=1):
    """local_class of every position, as the kernel reads it."""
    return local_class(torch.arange(length), classes, size).to(torch.int16)


def on_device(fn, *args, **kwargs):
    moved = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args]
    return tuple(x.cpu() for x in fn(*moved, **kwargs))


def test_classes_are_packed_in_order():
    slots = torch.tensor([[5, -1, 9, 12, 3, 8, -1, 1], [-1] * 8])
    leaves = torch.tensor([[1, 1, 0, 1, 2, 0, 0, 3], [0] * 8])
    leaf_of = torch.arange(4, dtype=torch.int16)  # each position is its own leaf
    packed, ends = on_device(pack_classes, slots, leaves, leaf_of, 3)
    assert packed[0, :5].tolist() == [9, 8, 5, 12, 3]  # the slot of leaf 3 belongs to nobody here
    assert ends.tolist() == [[0, 2, 4, 5], [0, 0, 0, 0]]


@pytest.mark.parametrize(("cache_format", "splits"), [(None, 4), ("fp8_ds_mla", 1)])
def test_leaves_against_the_reference(cache_format, splits):
    """Rows that are not selected are NaN; with splits the pieces of a class merge to the class."""
    q, ids, rows = randn(4, 6, 576), chosen(4, 130, 70), randn(130, 576, seed=2)
    rows[~torch.isin(torch.arange(130), ids)] = NAN
    kv = rows
    if cache_format:
        kv = new_latent_cache(3, cache_format, 64).fill_(0x7F)
        used = torch.unique(ids[ids >= 0])
        write_latent(kv, rows[used, :512], rows[used, 512:], used, cache_format)
    given = (q, kv, ids, ids, leaves_of(130, 4), 4, 2, SCALE, cache_format)
    out, lse = on_device(leaf_partials_triton, *given, splits=splits)
    want = exact.leaf_partials_reference(*given)
    pieces = [out.unflatten(0, (splits, 4)), lse.unflatten(0, (splits, 4))]
    for leaf in range(4):
        got = exact.merge_tree_reference(pieces[0][:, leaf], pieces[1][:, leaf])
        assert close(got[0], want[0][leaf], ulps=ULPS, floor=1.0)
        assert torch.equal(got[1] == -torch.inf, want[1][leaf] == -torch.inf)
        assert close(got[1], want[1][leaf], ulps=ULPS / 2, floor=1.0)  # 9 where the host's BLAS sums in another order


def test_strides_and_the_scale_of_a_cache_are_heeded():
    """q, slots, ids and lse as the engine may cut them out of larger tensors; an "fp8" cache with its own scale."""
    q, ids, rows = randn(4, 12, 576)[:, ::2], chosen(4, 130, 70).repeat(1, 2)[:, ::2], randn(130, 576, seed=2)
    ids = torch.where(torch.arange(70) < 35, ids, -1)  # each key once
    kv, scale = new_latent_cache(3, "fp8", 64), 0.05
    write_latent(kv, rows[:, :512], rows[:, 512:], torch.arange(130), "fp8", scale)
    given = (kv, ids, ids, leaves_of(130, 4), 4, 2, SCALE, "fp8", scale)
    out, lse = on_device(leaf_partials_triton, q, *given)
    want = exact.leaf_partials_reference(q.contiguous(), *given)
    assert close(out, want[0], ulps=ULPS, floor=1.0) and close(lse.exp(), want[1].exp(), ulps=ULPS, floor=1.0)
    want = exact.merge_tree_reference(out, lse)[0]
    for parts in ((out.transpose(1, 2).contiguous().transpose(1, 2), lse), (out, lse.mT.contiguous().mT)):
        assert close(on_device(merge_tree_triton, *parts)[0], want, ulps=4, floor=1.0)


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_the_tree_against_the_reference(nodes):
    out, lse = randn(nodes, 3, 5, 512), 3 * randn(nodes, 3, 5, seed=1)
    lse[:, 1], out[:, 1] = -torch.inf, 0.0
    lse[0, 2], out[0, 2] = -torch.inf, 0.0
    got, want = on_device(merge_tree_triton, out, lse), exact.merge_tree_reference(out, lse)
    assert close(got[0], want[0], ulps=4, floor=1.0) and close(got[1], want[1], ulps=4, floor=1.0)
    assert not got[0].isnan().any() and (got[1][1] == -torch.inf).all()


def test_a_nan_reaches_the_output_and_an_empty_class_stays_neutral():
    """One key of token 0; token 1 has three keys, token 2 none."""
    q, ids, rows = randn(4, 6, 576), chosen(4, 130, 70), randn(130, 576, seed=2)
    ids[1:] = torch.where(ids[1:] == ids[0, 5], -1, ids[1:])
    rows[ids[0, 5]] = NAN
    given = (q, rows, ids, ids, leaves_of(130, 8), 8, 2, SCALE)
    leaves = on_device(leaf_partials_triton, *given)
    for out, lse in (on_device(merge_tree_triton, *leaves), exact.merge_tree(*exact.leaf_partials_reference(*given))):
        assert out[0].isnan().all() and lse[0].isnan().all() and not out[1:].isnan().any()
        assert out[2].eq(0).all() and (lse[2] == -torch.inf).all() and lse[1].isfinite().all()


def node(size, rank, q, rows, ids, heads, cache_format=None, splits=1):
    """What one rank of `size` sends, its cache holding every row at its own place."""
    slots, leaf_of = localise(ids, size, rank), leaves_of(len(rows), CLASSES, size).to(q.device)
    kv = rows[rank::size].contiguous()
    if cache_format:
        kv = new_latent_cache(-(-len(kv) // 64), cache_format, device=q.device)
        mine, scale = rows[rank::size].float(), 1.0 if cache_format == "fp8" else None
        write_latent(kv, mine[:, :512], mine[:, 512:], torch.arange(len(mine), device=q.device), cache_format, scale)
        parts = leaf_partials_triton(
            q, kv, slots, ids, leaf_of, CLASSES // size, heads, SCALE, cache_format, scale, splits=splits
        )
    else:
        parts = leaf_partials_triton(q, kv, slots, ids, leaf_of, CLASSES // size, heads, SCALE, splits=splits)
    return merge_tree_triton(*parts)


def whole(size, rank, q, rows, ids, heads, **options):
    """Attention of TP rank `rank`'s heads at DCP size `size`."""
    first = rank // size * size
    group = q[:, first * heads : (first + size) * heads].contiguous()
    parts = [node(size, owner, group, rows, ids, heads, **options) for owner in range(size)]
    out, lse = merge_tree_triton(*(torch.stack(column) for column in zip(*parts, strict=True)))
    mine = slice((rank - first) * heads, (rank - first + 1) * heads)
    return out[:, mine].contiguous(), lse[:, mine].contiguous()


@pytest.mark.parametrize(("splits", "size"), [(1, 4), (2, 2)])
def test_the_same_bits_at_every_dcp_size(splits, size):
    """A rank's 16 heads fill the interpreter's tile, since numpy's products show in which row a head stands."""
    q, rows, ids = (x.to(DEVICE) for x in (randn(2, 128, 576), randn(64, 576, seed=2), chosen(2, 64, 40)))
    one = whole(1, 5, q, rows, ids, 16, splits=splits)
    many = whole(size, 5, q, rows, ids, 16, splits=splits)
    assert same_bytes(one[0], many[0]) and same_bytes(one[1], many[1])


@pytest.mark.gpu
@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize(("tokens", "heads", "splits"), [(1, 8, 4), (7, 2, 2), (40, 8, 1), (3, 16, 1)])
def test_the_same_bits_on_the_tensor_cores(cache_format, tokens, heads, splits):
    """bf16, 2048 keys of 20000, at most 128 heads in a group: where wgmma computes."""
    q, rows = randn(tokens, 8 * heads, 576).bfloat16().cuda(), randn(20000, 576, seed=2).cuda()
    ids = chosen(tokens, 20000, 2048).cuda()
    for rank in (0, 5):
        one = whole(1, rank, q, rows, ids, heads, cache_format=cache_format, splits=splits)
        assert not one[0].isnan().any()
        for size in (2, 4, 8):
            many = whole(size, rank, q, rows, ids, heads, cache_format=cache_format, splits=splits)
            assert same_bytes(one[0], many[0]) and same_bytes(one[1], many[1])
