"""The target's attention layer in one forward pass, among collaborators that record what they are given.

    Run                one pass: sizes, projections, backend and DCP manager, and what differs from the right flow
    Collaborators      the modules that the layer imports, of the run in progress

The layer's object is never initialised: its attributes are those that its constructor would have set. Sizes are small
and odd; the layer does no arithmetic that depends on them.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dcp_fix.doctor.stand_ins import module

KERNELS = ("vllm.models.deepseek_v32.common.kernels", "vllm.models.deepseek_v32.nvidia.kernels")
LAYER = "probe.attn"
TOKENS, PADDED, HEADS, LATENT, ROPE, NOPE, VALUE, QUERY = 3, 4, 2, 6, 4, 5, 3, 7
COMBINED = 1000.0  # what the stand-in for `combine` returns, in every element


class Group:
    """A process group of `size` ranks seen from rank 1. The other ranks' parts are zeros."""

    def __init__(self, size: int):
        self.world_size, self.rank_in_group = size, min(1, size - 1)

    def all_gather(self, x, dim):
        parts = [torch.zeros_like(x) for _ in range(self.world_size)]
        parts[self.rank_in_group] = x
        return torch.cat(parts, dim=dim)


class Manager:
    """Stand-in for the layer's DCP manager. Under PCP the combine is an all-reduce and keeps every head."""

    def __init__(self, group: Group, use_pcp: bool):
        self.group, self.use_pcp = group, use_pcp
        self.gathered: Tensor | None = None
        self.combined: tuple[Tensor, Tensor] | None = None

    def query_gather(self, query):
        self.gathered = self.group.all_gather(query, dim=1)
        return self.gathered

    def combine(self, partial_output, partial_lse, *, seq_lens, query_start_loc):
        self.combined = (partial_output, partial_lse)
        heads = partial_output.shape[1] // (1 if self.use_pcp else self.group.world_size)
        return torch.full((partial_output.shape[0], heads, LATENT), COMBINED)


class Backend:
    """Stand-in for the layer's attention implementation. Each head's output is its index."""

    supports_quant_query_input = False
    prepare_for_batch = record_logical_topk_ready = do_kv_cache_update = lambda *arguments: None

    def __init__(self, dcp: int, pcp: int):
        self.dcp_world_size, self.pcp_world_size = dcp, pcp
        self.query: Tensor | None = None

    def forward_mqa(self, query, kv_cache, metadata, layer):
        self.query = torch.cat(query, dim=-1) if isinstance(query, tuple) else query
        rows, heads, _ = self.query.shape
        out = torch.arange(heads, dtype=torch.float32)[None, :, None].expand(rows, heads, LATENT).contiguous()
        return out, torch.zeros(rows, heads)


class Run:
    """One forward pass of a decode batch. `use_pcp_read` tells whether the layer asked for PCP at all."""

    def __init__(self, dcp: int = 1, tp: int = 1, pcp: int = 1):
        self.backend, self.tp, self.pcp = Backend(dcp, pcp), Group(tp), Group(pcp)
        self.manager = Manager(Group(dcp), pcp > 1) if dcp > 1 else None
        self.dcp, self.use_pcp_read = dcp, False
        self.projected: Tensor | None = None
        lengths = torch.full((TOKENS,), 9, dtype=torch.int32)
        self.metadata = SimpleNamespace(
            **dict.fromkeys(("num_actual_tokens", "num_decode_tokens", "num_decodes"), TOKENS),
            seq_lens=lengths,
            decode=SimpleNamespace(seq_lens=lengths),
            query_start_loc=torch.arange(TOKENS + 1, dtype=torch.int32),
        )
        self.slots = torch.zeros(PADDED * pcp, dtype=torch.int64)  # under PCP the slots of every rank's tokens
        self.context = SimpleNamespace(
            attn_metadata={LAYER: self.metadata},
            slot_mapping={LAYER: self.slots},
            cudagraph_runtime_mode="NONE",
        )

    def project(self, output):
        self.projected = output
        return (output,)

    def layer(self, attention_class):
        """An object of the target's class, with the attributes that its constructor would have set."""

        def use_pcp(layer):
            self.use_pcp_read = True
            return self.pcp.world_size > 1

        decoding = {"use_pcp": property(use_pcp), "_use_sparse_mha": lambda layer, metadata: False}
        layer: Any = object.__new__(type("Probed", (attention_class,), decoding))
        vars(layer).update(self._attributes())
        return layer

    def _attributes(self) -> dict:
        norm = SimpleNamespace(weight=None, variance_epsilon=1e-6)
        parallel = SimpleNamespace(decode_context_parallel_size=self.dcp, cp_kv_cache_interleave_size=1)
        off = ("skip_topk", "pcp_shard_decode_requests", "_fp8_query", "_fp8_kv_needs_view")
        return dict(
            **dict.fromkeys(off, False),
            **dict.fromkeys(("indexer", "hisparse_cache"), None),
            **dict.fromkeys(("num_heads", "num_local_heads"), HEADS),
            **dict.fromkeys(("q_a_layernorm", "kv_a_layernorm"), norm),
            **dict.fromkeys(("_k_scale", "_q_scale", "kv_cache"), torch.ones(1)),
            layer_name=LAYER,
            impl=self.backend,
            dcp_manager=self.manager,
            topk_indices_buffer=torch.zeros(PADDED, 1, dtype=torch.int32),
            kv_cache_dtype="fp8_ds_mla",
            q_lora_rank=QUERY,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            qk_nope_head_dim=NOPE,
            qk_head_dim=NOPE + ROPE,
            v_head_dim=VALUE,
            fused_qkv_a_proj=lambda hidden: (torch.ones(PADDED, QUERY + LATENT + ROPE),),
            q_b_proj=lambda query: (torch.ones(PADDED, HEADS * (NOPE + ROPE)),),
            o_proj=self.project,
            rotary_emb=SimpleNamespace(cos_sin_cache=torch.zeros(4, ROPE)),
            W_UK_T=torch.ones(HEADS, NOPE, LATENT),
            W_UV=torch.full((HEADS, LATENT, VALUE), 1 / LATENT),
            _k_scale_float=1.0,
            _index_rope_interleave=True,
            _vllm_config=SimpleNamespace(parallel_config=parallel),
        )

    def faults(self) -> list[str]:
        """What differs from the flow in routing.py's docstring."""
        manager = self.manager
        heads = self.backend.query.shape[1] if self.backend.query is not None else 0
        wanted = HEADS if manager is None else HEADS * self.dcp // self.pcp.world_size
        found = [] if heads == wanted else [f"the backend gets {heads} query heads of the group's {wanted}"]
        if manager is not None and manager.combined is None:
            found.append("its partial result is never combined with the other ranks' and goes out as the answer")
        elif manager is not None and manager.combined[0].shape[1] != heads:
            found.append(f"combine gets {manager.combined[0].shape[1]} of {heads} heads")
        elif not found and self.projected is not None and not self._right_output():
            found.append("the output projection gets something else than the combined result")
        return found

    def _right_output(self) -> bool:
        heads = torch.full((HEADS,), COMBINED) if self.manager else torch.arange(HEADS, dtype=torch.float32)
        return torch.allclose(self.projected[:TOKENS], heads.repeat_interleave(VALUE).expand(TOKENS, -1))


class Collaborators:
    """The modules that attention.py imports. `run` is the run in progress."""

    def __init__(self):
        self.run = Run()

    def stand_ins(self) -> dict:
        kernels = module(fused_norm_rope=lambda *a, **k: a[1], fused_q=lambda *a, **k: (None, None, a[1]))
        return {
            **dict.fromkeys(KERNELS, kernels),
            "vllm.compilation.breakable_cudagraph": module(eager_break_during_capture=lambda method: method),
            "vllm.config": module(CUDAGraphMode=SimpleNamespace(NONE="NONE", PIECEWISE="PIECEWISE", FULL="FULL")),
            "vllm.distributed.parallel_state": module(
                get_tp_group=lambda: self.run.tp, get_pcp_group=lambda: self.run.pcp
            ),
            "vllm.forward_context": module(get_forward_context=lambda: self.run.context),
            "vllm.model_executor.layers.attention": module(MLAAttention=type("MLAAttention", (), {})),
            "vllm.model_executor.layers.attention.attention": module(get_attention_context=self.attention_context),
        }

    def attention_context(self, layer_name):
        return self.run.metadata, None, torch.zeros(1), self.run.slots
