"""Cache blocks: which of them a request gets, and which it can take over from an earlier one (the prefix cache).

A block id stands for one block on each of the D ranks of a DCP group, so it holds `block_size * dcp_size` tokens; with
an interleave that divides the block size these are consecutive positions. The bookkeeping is the same on every rank,
so every rank keeps its own and they agree without a message.

A full block is known by the digest of all token ids up to its end: two requests share it only if everything before it
is the same too. A hit covers whole blocks and always leaves at least one token to compute, whose logits are wanted.
Blocks of finished requests keep their content until another request needs the room, oldest first.

It does not: hold any key or value (kv_cache.py), or serve several requests at once.
"""

import hashlib
from array import array

from dcp_fix.base.errors import UserError
from dcp_fix.ownership import prefix_hit


class CacheFull(UserError):
    """A request that does not fit into the cache; nothing has been written for it."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens on each of `dcp_size` ranks.

    >>> pool = BlockPool(num_blocks=3, block_size=2, dcp_size=2)
    >>> table, cached = pool.open([7, 8, 9, 10, 11], capacity=8)
    >>> pool.close(table, [7, 8, 9, 10, 11, 12])
    >>> pool.open([7, 8, 9, 10, 55], capacity=12)
    ([0, 1, 2], 4)
    """

    def __init__(self, num_blocks: int, block_size: int, dcp_size: int) -> None:
        self.num_blocks, self.block_size, self.dcp_size = num_blocks, block_size, dcp_size
        self.tokens_per_block = block_size * dcp_size
        self.idle: dict[int, bytes | None] = dict.fromkeys(range(num_blocks))  # block -> key, next to be reused first
        self.known: dict[bytes, int] = {}  # key -> block that holds this content

    def open(self, tokens: list[int], capacity: int) -> tuple[list[int], int]:
        """Blocks for `capacity` tokens that begin with `tokens`: (block table, how many tokens it holds already).

        Raises CacheFull, before anything changes, if the pool is smaller than that.
        """
        needed = -(-capacity // self.tokens_per_block)
        if needed > len(self.idle):
            raise CacheFull(
                f"a request of {capacity} tokens needs {needed} blocks of {self.tokens_per_block} tokens and the cache "
                f"has {len(self.idle)}; shorten the prompt or make the cache larger"
            )
        hits = self.match(tokens)
        for block in hits:
            del self.idle[block]
        fresh = list(self.idle)[: needed - len(hits)]
        for block in fresh:
            self.known.pop(self.idle.pop(block), None)
        return hits + fresh, len(hits) * self.tokens_per_block

    def match(self, tokens: list[int]) -> list[int]:
        """The blocks that hold the longest known prefix of `tokens`, short of their last token."""
        blocks = []
        for key in self.keys(tokens[: prefix_hit(len(tokens) - 1, self.block_size, self.dcp_size)]):
            if key not in self.known:
                break
            blocks.append(self.known[key])
        return blocks

    def close(self, table: list[int], tokens: list[int]) -> None:
        """Give back a request's blocks; those that `tokens`, whose rows were written, fill stay known."""
        keys = dict(zip(table, self.keys(tokens), strict=False))
        for block in reversed(table):  # the end of a prefix is useless without its start, so it goes first
            key = keys.get(block)
            if key is not None and self.known.setdefault(key, block) != block:
                key = None  # another block holds the same content already
            self.idle = {block: None} | self.idle if key is None else self.idle | {block: key}

    def keys(self, tokens: list[int]) -> list[bytes]:
        """One digest per full block, each over every token up to the block's end."""
        running, keys, unit = hashlib.sha256(), [], self.tokens_per_block
        for end in range(unit, len(tokens) + 1, unit):
            running.update(array("q", tokens[end - unit : end]).tobytes())
            keys.append(running.digest())
        return keys


def open_request(pool: BlockPool, tokens: list[int], capacity: int) -> tuple[list[int], int]:
    """`pool.open`, whichever kind of pool it is."""
    return pool.open(tokens, capacity)
