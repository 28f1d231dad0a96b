"""Tensor parallelism from outside: the slice of a model's weights that one rank of a TP group holds.

    q_b_proj, kv_b_proj        rows      heads
    o_proj                     columns   heads
    mlp gate_proj, up_proj     rows      inner width; of an expert layer the same slice of every expert's block
    mlp down_proj              columns   the same
    lm_head                    rows      vocabulary, padded with zero rows to a multiple of the group
    everything else            whole     embeddings, norms, latent projections, the indexer, the router

A sharded `Model` is an ordinary one with fewer heads and narrower MLPs: o_proj and down_proj give partial sums that an
all-reduce completes, and the logits of the ranks lie side by side. Layout as in vLLM's and Megatron's column and row
parallel layers.

It does not: move anything between ranks, or shard the KV cache (see ownership.py and sharded.py).
"""

from torch import Tensor
from torch.nn.functional import pad

from dcp_fix.base.errors import UserError
from dcp_fix.engine.config import Config
from dcp_fix.engine.model import Model

ROWS, COLUMNS = 0, 1
BY_HEAD = {"self_attn.q_b_proj.weight": ROWS, "self_attn.kv_b_proj.weight": ROWS, "self_attn.o_proj.weight": COLUMNS}
BY_WIDTH = {"mlp.gate_proj.weight": ROWS, "mlp.up_proj.weight": ROWS, "mlp.down_proj.weight": COLUMNS}


def check_tp(config: Config, tp_size: int) -> None:
    """Raise UserError unless `tp_size` divides everything that tensor parallelism splits."""
    splits = {"attention heads": config.num_attention_heads, "MLP columns": config.intermediate_size}
    splits["expert columns"] = config.moe_intermediate_size
    for what, count in splits.items():
        if tp_size < 1 or count % tp_size:
            raise UserError(f"a TP size of {tp_size} does not divide the model's {count} {what}; choose a divisor")


def check_dcp(tp_size: int, dcp_size: int) -> None:
    """Raise UserError unless the TP group splits into subgroups of `dcp_size` ranks."""
    if dcp_size < 1 or tp_size % dcp_size:
        raise UserError(f"a DCP size of {dcp_size} does not divide the TP size {tp_size}; choose a divisor")


def shard(model: Model, rank: int, size: int) -> Model:
    """The model that rank `rank` of `size` holds. Raises UserError if the heads or widths do not divide."""
    check_tp(model.config, size)
    return Model(model.config, {name: part(model.config, name, w, rank, size) for name, w in model.weights.items()})


def part(config: Config, name: str, weight: Tensor, rank: int, size: int) -> Tensor:
    """One rank's share of the weight called `name` (names as `Model` has them: experts fused)."""
    if name == "lm_head.weight":
        return vocabulary_rows(weight, rank, size)
    _, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest in BY_HEAD:
        return slice_of(weight, BY_HEAD[rest], rank, size)
    if rest in BY_WIDTH:
        dim = BY_WIDTH[rest]
        blocks = weight.shape[dim] // inner_width(config, int(name.split(".")[2]))
        return slice_of(weight.unflatten(dim, (blocks, -1)), dim + 1, rank, size).flatten(dim, dim + 1)
    return weight


def inner_width(config: Config, layer: int) -> int:
    """Inner width of the layer's MLP, or of one expert's."""
    return config.moe_intermediate_size if config.mlp_layer_types[layer] == "sparse" else config.intermediate_size


def vocabulary_rows(weight: Tensor, rank: int, size: int) -> Tensor:
    """Rows [ceil(V / size), hidden] of lm_head, zeros beyond the last; cut those off after the gather."""
    rows = -(-weight.shape[0] // size)
    mine = weight[rank * rows : (rank + 1) * rows]
    return pad(mine, (0, 0, 0, rows - mine.shape[0]))


def slice_of(weight: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """The rank-th of `size` equal pieces along `dim`, contiguous."""
    return weight.chunk(size, dim)[rank].contiguous()
