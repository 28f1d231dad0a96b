"""The lightning indexer: scores, an exact top-k with one total order, and its merge over KV shards.

    score[t, n] = sum_h w[t, h] * relu(q[t, h] . k[n])      h over the indexer's own heads, all in fp32

`head_weights` w hold every positive factor: the projection, head_dim**-0.5 and heads**-0.5 (relu(a x) = a relu(x)).

One total order everywhere: score descending, then id ascending; -0.0 equals 0.0; -inf is never selected. A NaN is no
score but a fault: it comes before all, and makes every id of its row FAULT, so that attention can say so. One int64 per
candidate carries it, score bits above inverted id, so that a plain integer top-k is exact, and exact again on
the candidates of several shards (where ranks break ties by different rules, no merge can repair the choice).

Equal for every shard count, bit for bit: the bits of an element of a matrix product depend on the product's *shape* (a
single key takes another way through BLAS than 300). So keys are scored in tiles of one fixed size, zero-padded, and
heads are summed elementwise in a fixed order. What is left to trust, and tested: in a product of one shape, the bits of
a column do not depend on where it stands. MKL behaves so; no BLAS promises it in writing.

Shapes: T tokens, I heads of the indexer, N keys of this shard, k selected. Ids are global positions.
It does not: read the cache (kv_cache.py), turn ids into slots (ownership.py), quantise queries.
Source: DeepSeek-V3.2's indexer as in transformers' GlmMoeDsa; the exact order and the exact merge are this project's.
"""

import torch
from torch.nn.functional import pad

from dcp_fix.ranks.group import Group

TILE = {"cpu": 256, "cuda": 8192}  # keys per product
ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}  # of one product [tokens * heads, TILE]: 4 MiB stay in a core's cache
MERGE_ROWS = 1024  # tokens per exchange of candidates
ID_MASK = 0xFFFFFFFF
NO_CANDIDATE, NAN_CANDIDATE = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
HOLE, FAULT = -1, -2  # in place of an id: no key; a score that is NaN


def index_scores(q: torch.Tensor, head_weights: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [T, I, d], head_weights [T, I], k [N, d] -> fp32 [T, N]."""
    tokens, heads, dim = q.shape
    tile, rows, weights = TILE[q.device.type], q.float().reshape(-1, dim), head_weights.float()[..., None]
    scores = torch.empty(tokens, len(k), device=q.device)
    for start in range(0, len(k), tile):
        keys = k[start : start + tile].float()
        keys = pad(keys, (0, 0, 0, tile - len(keys)))  # [tile, d]
        dots = (rows @ keys.T).view(tokens, heads, tile).relu_().mul_(weights)
        scores[:, start : start + tile] = _sum_heads(dots)[:, : len(k) - start]
    return scores


def topk(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [T, N], ids [N] or [T, N] -> the first k in the total order: ids int32 [T, k], scores fp32 [T, k].

    Where there are fewer than k, id -1 with score -inf; of a NaN, id FAULT.

    >>> topk(torch.tensor([[2.0, 3.0, 2.0]]), torch.tensor([5, 6, 1]), k=2)[0].tolist()
    [[6, 1]]
    """
    return _decode(_best(_encode(scores, ids), k, ordered=True))


def select(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    k_local: torch.Tensor,
    key_positions: torch.Tensor,
    query_positions: torch.Tensor,
    k: int,
    group: Group,
) -> torch.Tensor:
    """The positions that each query attends to: int32 [T, k], ascending, -1 last; the same on every rank. Of a query
    that scores a key it sees NaN, every one is FAULT.

    q [T, I, d], head_weights [T, I], query_positions [T]: the same on every rank of `group`.
    k_local [N, d], key_positions [N] ascending: this rank's keys; over the ranks, each position once and none missing.
    A query at position p sees the keys at positions <= p. Where those are no more than k, all are selected unscored.
    """
    _check(q, head_weights, k_local, key_positions, query_positions)
    ids = torch.arange(k, dtype=torch.int32, device=q.device).expand(len(q), k)
    ids = torch.where(ids <= query_positions[:, None], ids, HOLE)
    to_score = _rows_to_score(query_positions, k)
    for rows in to_score.split(MERGE_ROWS) if len(to_score) else ():  # nothing splits into one piece of nothing
        candidates = _candidates(q[rows], head_weights[rows], k_local, key_positions, query_positions[rows], k)
        ids[rows] = _merge(candidates, group, k)
    return ids


def _candidates(q, head_weights, k_local, key_positions, query_positions, k):
    """This rank's k best visible keys of each query, encoded: int64 [T, k]."""
    tokens, heads, _ = q.shape
    step = max(1, ELEMENTS[q.device.type] // (heads * TILE[q.device.type]))
    parts = []
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        seen = _visible_prefix(key_positions, query_positions[rows])
        scores = index_scores(q[rows], head_weights[rows], k_local[:seen])  # [t, seen]
        positions = key_positions[:seen]
        scores.masked_fill_(positions > query_positions[rows, None], -torch.inf)
        parts.append(_best(_encode(scores, positions), k))
    return torch.cat(parts)


def _rows_to_score(query_positions, k):
    """Rows with more than k visible keys. On a GPU a short batch takes all rows, for that answer would stall it."""
    if query_positions.is_cuda and len(query_positions) <= MERGE_ROWS:
        return torch.arange(len(query_positions), device=query_positions.device)
    return (query_positions >= k).nonzero().squeeze(1)


def _visible_prefix(key_positions, query_positions):
    """How many leading keys some query of the chunk sees; on a GPU a short batch takes all and masks."""
    if query_positions.is_cuda and len(query_positions) <= MERGE_ROWS:
        return len(key_positions)
    return int((key_positions <= query_positions.max()).sum())


def _merge(candidates, group, k):
    """int64 [T, k] of each rank -> ids int32 [T, k] ascending, -1 last; all FAULT where one is."""
    if group.size > 1:
        candidates = _best(group.all_gather(candidates, dim=1), k)
    ids = _decode(candidates)[0]
    last = torch.iinfo(torch.int32).max
    ids = ids.masked_fill(ids == HOLE, last).sort(dim=1)[0]
    return ids.masked_fill_(ids == last, HOLE).masked_fill_(ids[:, :1] == FAULT, FAULT)


def _best(keys, k, ordered=False):
    """The k largest of int64 [T, N], padded with NO_CANDIDATE."""
    if keys.shape[1] < k:
        keys = pad(keys, (0, k - keys.shape[1]), value=NO_CANDIDATE)
    return keys.topk(k, dim=1, sorted=ordered)[0] if keys.shape[1] > k or ordered else keys


def _encode(scores, ids):
    """fp32 scores [T, N], ids -> int64 whose order is the total order."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32  # negative floats count backwards
    keys = torch.where(scores > -torch.inf, ordered | (ID_MASK - ids.long()), NO_CANDIDATE)
    return keys.masked_fill_(scores.isnan(), NAN_CANDIDATE)


def _decode(keys):
    """The inverse of `_encode`: ids int32, scores fp32; a missing candidate is (-1, -inf), a NaN (FAULT, NaN)."""
    bits = (keys >> 32).int()
    scores = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    absent = keys == NO_CANDIDATE
    ids = (ID_MASK - (keys & ID_MASK)).int().masked_fill(keys == NAN_CANDIDATE, FAULT)
    return ids.masked_fill_(absent, HOLE), scores.masked_fill(absent, -torch.inf)


def _sum_heads(x):
    """[T, I, N] -> [T, N], overwriting x: pairwise, elementwise, in an order that depends on I alone."""
    heads = x.shape[1]
    while heads > 1:
        half = heads // 2
        x[:, :half] += x[:, heads - half : heads]
        heads -= half
    return x[:, 0]


def _check(q, head_weights, k_local, key_positions, query_positions):
    tokens, heads, dim = q.shape
    if head_weights.shape != (tokens, heads) or len(query_positions) != tokens or k_local.shape[1] != dim:
        raise ValueError(
            f"select needs q [T, I, d], head_weights [T, I], k_local [N, d], query_positions [T]; got {list(q.shape)}, "
            f"{list(head_weights.shape)}, {list(k_local.shape)}, {list(query_positions.shape)}"
        )
    if len(key_positions) != len(k_local):
        raise ValueError(f"{len(k_local)} keys with {len(key_positions)} positions; pass one position per key")
    if not key_positions.is_cuda and (key_positions.diff() <= 0).any():
        raise ValueError("key_positions must ascend: pass the keys in the order of their local index")
