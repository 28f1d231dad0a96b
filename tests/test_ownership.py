"""Ownership against the deal it describes, card by card, and against the worked cases people got wrong."""

import doctest

import pytest
import torch

from dcp_fix import ownership
from dcp_fix.ownership import (
    chunk_local_lengths,
    class_of,
    global_position,
    local_index,
    local_length,
    localise,
    owner,
    pack_valid,
    prefix_hit,
    slot_mapping,
    slots_of,
)

GROUPS = [(d, i) for d in (1, 2, 4, 8) for i in (1, 4, 64)]
groups = pytest.mark.parametrize("dcp_size, interleave", GROUPS)
LENGTH = 1031  # prime: the last round is cut short for every D and I


def deal(length, dcp_size, interleave):
    """The shards, by dealing `interleave` positions at a time to one rank after another."""
    shards, rank = [[] for _ in range(dcp_size)], 0
    for start in range(0, length, interleave):
        shards[rank] += range(start, min(start + interleave, length))
        rank = (rank + 1) % dcp_size
    return shards


def test_docstrings():
    assert doctest.testmod(ownership).failed == 0


@groups
def test_a_shard_is_what_the_deal_gives(dcp_size, interleave):
    positions = torch.arange(LENGTH)
    for rank, shard in enumerate(deal(LENGTH, dcp_size, interleave)):
        mine = positions[owner(positions, dcp_size, interleave) == rank]
        rows = torch.arange(len(shard))
        assert mine.tolist() == shard
        assert local_index(mine, dcp_size, interleave).tolist() == rows.tolist()
        assert global_position(rows, dcp_size, rank, interleave).tolist() == shard


@groups
def test_local_length_counts_the_shard_at_every_length(dcp_size, interleave):
    lengths = torch.arange(LENGTH + 1)
    for rank in range(dcp_size):
        owned = owner(torch.arange(LENGTH), dcp_size, interleave) == rank
        counted = torch.cat((torch.zeros(1, dtype=torch.int64), owned.cumsum(0)))
        assert local_length(lengths, dcp_size, rank, interleave).tolist() == counted.tolist()


@groups
def test_ints_and_tensors_agree(dcp_size, interleave):
    for p in (0, 1, 63, 64, 255, 256, 1030):
        tensor = torch.tensor(p)
        assert owner(p, dcp_size, interleave) == owner(tensor, dcp_size, interleave).item()
        assert local_index(p, dcp_size, interleave) == local_index(tensor, dcp_size, interleave).item()
        last = dcp_size - 1
        assert local_length(p, dcp_size, last, interleave) == local_length(tensor, dcp_size, last, interleave).item()


@pytest.mark.parametrize(
    "length, new_tokens, dcp_size, interleave, expected",
    [
        (10, 3, 2, 1, [[4, 5, 5], [4, 4, 5]]),
        (10, 3, 2, 2, [[4, 5, 6], [4, 4, 4]]),
        (10, 4, 4, 1, [[2, 2, 3, 3], [2, 2, 2, 3], [2, 2, 2, 2], [1, 2, 2, 2]]),
    ],
)
def test_case_6_each_query_token_localises_its_own_global_length(length, new_tokens, dcp_size, interleave, expected):
    seen = torch.arange(length - new_tokens + 1, length + 1)
    ranks = range(dcp_size)
    assert [local_length(seen, dcp_size, rank, interleave).tolist() for rank in ranks] == expected
    # The fault: one localised length, counted down per token, as if every new token were this rank's.
    back = torch.arange(new_tokens - 1, -1, -1)
    counted_down = [(local_length(length, dcp_size, rank, interleave) - back).tolist() for rank in ranks]
    assert counted_down != expected


CASE_7 = {
    (1, 0): [28, -1, 29, -1, 30, -1, 31, -1, 12, -1],
    (1, 1): [-1, 28, -1, 29, -1, 30, -1, 31, -1, 12],
    (2, 0): [28, 29, -1, -1, 30, 31, -1, -1, 12, 13],
    (2, 1): [-1, -1, 28, 29, -1, -1, 30, 31, -1, -1],
}


@pytest.mark.parametrize("interleave, rank", CASE_7)
def test_case_7_a_global_id_becomes_a_local_slot_on_its_owner_only(interleave, rank):
    slots = slot_mapping(torch.arange(10), torch.tensor([7, 3]), 4, 2, rank, interleave)
    assert slots.dtype == torch.int64
    assert slots.tolist() == CASE_7[interleave, rank]
    # The fault: the global id looked up in the local table runs off its end.
    with pytest.raises(IndexError, match="allocate 3 blocks"):
        slots_of(torch.arange(10), torch.tensor([7, 3]), 4)


@groups
def test_every_selected_id_is_owned_exactly_once_and_holes_by_nobody(dcp_size, interleave):
    generator = torch.Generator().manual_seed(dcp_size * 100 + interleave)
    ids = torch.randint(-1, LENGTH, (7, 33), generator=generator, dtype=torch.int32)
    ids[0], ids[1, ::2] = -1, -7  # any negative id is a hole
    local = torch.stack([localise(ids, dcp_size, rank, interleave) for rank in range(dcp_size)])
    assert local.dtype == torch.int32
    assert ((local >= 0).sum(dim=0) == (ids >= 0)).all() and (local >= -1).all()
    back = torch.stack([global_position(row, dcp_size, rank, interleave) for rank, row in enumerate(local)])
    assert torch.where(local >= 0, back, -1).amax(dim=0).tolist() == ids.clamp(min=-1).tolist()


@groups
def test_over_the_ranks_each_slot_is_used_once(dcp_size, interleave):
    blocks = -(-LENGTH // (16 * dcp_size)) + 4 * interleave // 16 + 1
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(7))
    slots = [slot_mapping(torch.arange(LENGTH), table, 16, dcp_size, rank, interleave) for rank in range(dcp_size)]
    owned = [s[s >= 0] for s in slots]
    assert sum(len(s) for s in owned) == LENGTH
    assert all(len(s.unique()) == len(s) for s in owned)


def test_slots_do_not_overflow_32_bits():
    local, table = torch.tensor([5], dtype=torch.int32), torch.tensor([2**26], dtype=torch.int32)
    assert slots_of(local, table, 64).item() == 2**32 + 5


def test_a_rank_that_owns_nothing_needs_no_blocks():
    local, no_blocks = torch.full((3,), -1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    for rows in (3, 0):
        slots = slots_of(local[:rows], no_blocks, 64)
        assert slots.tolist() == [-1] * rows and slots.dtype == torch.int64


def test_a_short_block_table_is_refused_only_where_this_rank_needs_it():
    positions = torch.arange(16, 18)
    assert slot_mapping(positions[:1], torch.tensor([7, 3]), 4, 2, 1).tolist() == [-1]
    with pytest.raises(IndexError, match="local index 8 .* 2 blocks of 4 tokens hold 8; allocate 3 blocks"):
        slot_mapping(positions, torch.tensor([7, 3]), 4, 2, 0)


def test_case_9_holes_are_packed_away_and_order_kept():
    row = torch.tensor([[-1, 2, -1, -1, 0, -1, 1, -1]])
    packed, counts = pack_valid(row)
    assert packed.tolist() == [[2, 0, 1, -1, -1, -1, -1, -1]] and counts.tolist() == [3]
    # The fault: masking columns by the local length.
    assert [i for i in row[0, :3].tolist() if i >= 0] == [2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens, keys", [(1, 1), (5, 13), (3, 0), (0, 4), (11, 257)])
def test_pack_valid_against_a_loop(tokens, keys, dtype):
    ids = torch.randint(-2, 3, (tokens, keys), generator=torch.Generator().manual_seed(keys)).to(dtype)
    packed, counts = pack_valid(ids)
    assert packed.dtype == dtype and packed.shape == ids.shape
    for row, got, count in zip(ids.tolist(), packed.tolist(), counts.tolist(), strict=True):
        valid = [i for i in row if i >= 0]
        assert got == valid + [-1] * (keys - len(valid)) and count == len(valid)


@pytest.mark.parametrize("classes", [8, 16])
@groups
def test_a_rank_owns_the_classes_congruent_to_it(dcp_size, interleave, classes):
    positions = torch.arange(LENGTH)
    assert (class_of(positions, classes, interleave) % dcp_size == owner(positions, dcp_size, interleave)).all()


def test_case_11_each_chunk_has_its_own_length_per_rank():
    assert chunk_local_lengths(11, 2, 1, 4) == [[4, 4], [2, 1]]
    assert chunk_local_lengths(8, 2, 1, 4) == [[4, 4]], "no empty chunk after a last one that is full"
    assert chunk_local_lengths(0, 2, 1, 4) == []


@groups
@pytest.mark.parametrize("context", [0, 1, 11, 64, 255, LENGTH])
@pytest.mark.parametrize("chunk", [64, 192])
def test_chunks_reassemble_the_context_in_order(dcp_size, interleave, context, chunk):
    positions = []
    for c, lengths in enumerate(chunk_local_lengths(context, dcp_size, interleave, chunk)):
        assert all(0 <= n <= chunk for n in lengths)
        rows = [torch.arange(c * chunk, c * chunk + n) for n in lengths]
        chunked = [global_position(row, dcp_size, rank, interleave) for rank, row in enumerate(rows)]
        positions += torch.cat(chunked).sort().values.tolist()
    assert positions == list(range(context))


def test_case_13_a_replicated_cache_has_its_own_table_and_every_slot():
    everywhere = [28, 29, 30, 31, 12, 13, 14, 15, 36, 37]
    assert slot_mapping(torch.arange(10), torch.tensor([7, 3, 9]), 4).tolist() == everywhere
    for rank in range(2):  # while the latent cache of the same tokens is sharded
        assert slot_mapping(torch.arange(10), torch.tensor([7, 3]), 4, 2, rank).tolist() == CASE_7[1, rank]


@pytest.mark.parametrize(
    "shared, block_size, dcp_size, hit",
    [(150, 16, 2, 128), (150, 16, 1, 144), (31, 16, 2, 0), (256, 64, 4, 256), (0, 64, 8, 0)],
)
def test_case_14_a_prefix_hit_is_whole_blocks_on_every_rank(shared, block_size, dcp_size, hit):
    assert prefix_hit(shared, block_size, dcp_size) == hit <= shared


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: owner(3, 0), "dcp_size=0"),
        (lambda: local_index(3, 2, 0), "interleave=0"),
        (lambda: local_length(3, 2, 2), "dcp_rank=2 is not one of the 2 ranks"),
        (lambda: localise(torch.tensor([1]), 2, -1), "dcp_rank=-1"),
        (lambda: chunk_local_lengths(11, 2, 4, 6), "chunk=6 is not a multiple of interleave=4"),
        (lambda: chunk_local_lengths(11, 2, 1, 0), "chunk=0"),
    ],
)
def test_bad_arguments_name_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("length", [-1, -2, -64, -(10**12)])
@pytest.mark.parametrize("dcp_size, interleave", [(1, 1), (2, 1), (4, 16)])
def test_a_negative_length_holds_no_position(length, dcp_size, interleave):
    """Clamped, not refused: ints and tensors alike."""
    for rank in range(dcp_size):
        assert local_length(length, dcp_size, rank, interleave) == 0
        assert local_length(torch.tensor([length, 3]), dcp_size, rank, interleave)[0] == 0
    assert chunk_local_lengths(length, dcp_size, interleave, 64) == []
    assert prefix_hit(length, 16, dcp_size) == 0
