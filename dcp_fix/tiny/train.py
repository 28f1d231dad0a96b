"""Train the small checkpoint: `dcp-fix train`, which shows how long it will take.

A retrieval model does not learn from facts alone; what works is a curriculum in which each lesson must be mastered
before the next: words said again and again, then with other words between them, then pairs in changing order, then few
facts in short texts, then more and longer. At the end the texts are longer than `index_topk`, first with full attention
while the indexer learns to predict where attention goes, then with only the keys it selects.

Each step minimises the weighted cross-entropy of the next token plus, for each indexer, the Kullback-Leibler
divergence between the attention of the layers that it serves (averaged over heads, for a sample of queries) and the
softmax of its scores. The indexer's inputs and targets are detached, so the two losses train disjoint weights, as in
the DeepSeek-V3.2 technical report.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dcp_fix.engine.checkpoint import Config, fuse_experts, split_experts, weight_shapes
from dcp_fix.engine.engine import resolve_device
from dcp_fix.engine.model import Layer, Model, PlainAttention
from dcp_fix.tiny import corpus

GEOMETRY = {  # what Hopper's sparse kernels accept, at the smallest width that learns the task
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": len(corpus.WORDS),
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 128,
    "head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk": 512,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "indexer_types": ["full", "shared", "full"],
    "index_topk_pattern": "FSF",
    "indexer_rope_interleave": True,
    "mlp_layer_types": ["dense", "dense", "sparse"],
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "max_position_embeddings": 8448,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": corpus.BOS,
    "eos_token_id": corpus.END,
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Stage:
    """One lesson: texts of `kind` and `lengths` (drawn per batch), until accuracy is `gate` after at least `steps`
    steps.
    """

    kind: str
    lengths: tuple[int, ...]
    facts: tuple[int, int]
    steps: int
    gate: float
    indexer: bool = False  # teach the indexer
    sparse: bool = False  # attend to the indexer's selection only, where the text is longer than index_topk


STAGES = (
    Stage("repeats", (64,), (0, 0), 200, 0.9),
    Stage("strided", (128,), (0, 0), 200, 0.9),
    Stage("pairs", (128,), (0, 0), 200, 0.9),
    Stage("facts", (96,), (2, 3), 200, 0.9),
    Stage("facts", (128,), (2, 5), 200, 0.9),
    Stage("facts", (256,), (2, 12), 400, 0.95),
    Stage("facts", (256, 512), (2, 12), 150, 0.98),
    Stage("facts", (512,), (2, 20), 200, 0.98),
    Stage("facts", (512, 1024, 1536, 2560), (2, 20), 400, 0.98, indexer=True),
    Stage("facts", (512, 1024, 1536, 2560, 8192), (2, 20), 400, 0.98, indexer=True, sparse=True),
)
MOST_STEPS = 20  # a lesson that is not mastered in this many times its steps has failed: try another seed
BATCH_TOKENS = 16384
PEAK_RATE, WARMUP = 7e-4, 200
INDEXER_ROWS = 64  # queries per text whose attention teaches the indexer


class ObservedAttention(PlainAttention):
    """`PlainAttention` that also gathers, for sampled queries, what the indexer should have scored."""

    def __init__(self, config: Config, rows: Tensor, length: int, sparse: bool) -> None:
        super().__init__(config, length, rows.device)
        self.rows, self.sparse = rows, sparse  # rows [B, R], sampled query positions
        self.scores: list[Tensor] = []  # per full layer, log-softmax of the indexer [B, R, T]
        self.targets: list[
            Tensor
        ] = []  # per full layer, attention of the layers that share it [B, R, T], not normalised

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        """As in `PlainAttention`; observes on the way."""
        q, k, v, q_latent = self.project(layer, x)
        future = torch.arange(x.shape[-2], device=x.device) > self.rows[..., None]  # [B, R, T]
        if layer.has_indexer:
            self.scores.append(self.indexer_rows(layer, x.detach(), q_latent.detach(), future))
            self.targets.append(torch.zeros_like(self.scores[-1]))
            if self.sparse and x.shape[-2] > self.config.index_topk:
                self.mask = self.select(layer, x.detach(), q_latent.detach())
        self.targets[-1] += self.attention_rows(q, k, future)
        mask = None if self.mask is None else self.mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.config.scale)
        return out.transpose(-3, -2)

    @torch.no_grad()
    def attention_rows(self, q: Tensor, k: Tensor, future: Tensor) -> Tensor:
        """Attention of the sampled queries, averaged over heads [B, R, T]."""
        index = self.rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
        scores = (q.gather(2, index) @ k.transpose(-1, -2)).float() * self.config.scale
        return scores.masked_fill_(future[:, None], -torch.inf).softmax(-1).mean(1)

    def indexer_rows(self, layer: Layer, x: Tensor, q_latent: Tensor, future: Tensor) -> Tensor:
        """Log-softmax of the indexer's scores for the sampled queries [B, R, T]."""
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        q, weights = layer.index_queries(q_latent[batch, self.rows], x[batch, self.rows], self.cos_sin[self.rows])
        k = layer.index_keys(x, self.cos_sin)
        each = torch.einsum("brhd,btd->brht", q, k).relu()
        scores = torch.einsum("brht,brh->brt", each.float(), weights)
        return scores.masked_fill(future, -torch.inf).log_softmax(-1)

    def indexer_loss(self) -> Tensor:
        """Mean Kullback-Leibler divergence of the indexers from the attention that they should predict."""
        losses = []
        for scores, target in zip(self.scores, self.targets, strict=True):
            p = target / target.sum(-1, keepdim=True)
            losses.append(torch.where(p > 0, p * (p.clamp_min(1e-30).log() - scores), 0.0).sum(-1).mean())
        return torch.stack(losses).mean()


class Texts(torch.utils.data.IterableDataset):
    """Batches of training texts for one stage: (ids [B, T], weights [B, T]), about `tokens` ids each, endless."""

    def __init__(self, stage: Stage, seed: str, tokens: int) -> None:
        self.stage, self.seed, self.tokens = stage, seed, tokens

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        seed = f"{self.seed} {worker.id if worker else 0}"
        streams = [corpus.texts(f"{seed} {n}", self.stage.kind, n, self.stage.facts) for n in self.stage.lengths]
        turn = 0
        while True:
            length, stream = self.stage.lengths[turn % len(streams)], streams[turn % len(streams)]
            turn += 1
            ids, weights = zip(*(next(stream) for _ in range(max(1, self.tokens // length))), strict=True)
            yield torch.tensor(ids), torch.tensor(weights)


def new_weights(config: Config, seed: int) -> dict[str, Tensor]:
    """Fresh fp32 weights: ones for norms, zeros for biases, otherwise normal with variance 1 / fan-in (fan-in x
    layers into the residual).
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith("bias"):
            weights[name] = torch.zeros(shape)
        elif "norm" in name:
            weights[name] = torch.ones(shape)
        else:
            deep = 2 * config.num_hidden_layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            spread = 1.0 if "embed" in name else (shape[-1] * deep) ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * spread
    return fuse_experts(weights, config)


def losses(model: Model, ids: Tensor, weights: Tensor, stage: Stage) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy, indexer loss (0 where the stage does not teach it), and accuracy on the tokens that
    count most.
    """
    inputs, targets, marks = ids[:, :-1], ids[:, 1:], weights[:, 1:]
    if stage.indexer:
        attend = ObservedAttention(
            model.config,
            torch.multinomial(marks + 0.05, min(INDEXER_ROWS, marks.shape[1])),
            inputs.shape[1],
            stage.sparse,
        )
    else:
        attend = PlainAttention(model.config, inputs.shape[1], ids.device)
    logits = model.logits(model.forward(inputs, attend)).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(marks)
    hardest = marks == marks.max()
    accuracy = (logits.argmax(-1) == targets)[hardest].float().mean()
    indexer = attend.indexer_loss() if stage.indexer else torch.zeros((), device=ids.device)
    return (each * marks).sum() / marks.sum(), indexer, accuracy


@torch.no_grad()
def exact_match(model: Model, name: str, count: int, seed: int, batch_tokens: int = BATCH_TOKENS) -> float:
    """Share of held-out prompts of class `name` whose whole answer, end token included, is the greedy continuation."""
    prompts = corpus.prompts(name, count, seed)
    device = model.weights["lm_head.weight"].device
    right = 0
    size = max(1, batch_tokens // corpus.CLASSES[name][0])
    for group in (prompts[i : i + size] for i in range(0, count, size)):
        ids = torch.tensor([p.ids + p.answer for p in group], device=device)
        logits = model.logits(model.forward(ids[:, :-1], PlainAttention(model.config, ids.shape[1] - 1, device)))
        answer = len(group[0].answer)
        right += int((logits[:, -answer:].argmax(-1) == ids[:, -answer:]).all(-1).sum())
    return right / count


@dataclass
class Progress:
    """What `train` reports after every step: the lesson, the step in it, losses and smoothed accuracy, seconds since
    the start.
    """

    stage: int
    step: int
    loss: float
    indexer: float
    accuracy: float
    seconds: float


class Trainer:
    """Weights, optimiser and the loop over stages.

    fp32 master weights; the forward pass runs in bf16 on a GPU and fp32 on a CPU.
    """

    def __init__(
        self,
        seed: int,
        device: str | torch.device,
        batch_tokens: int = BATCH_TOKENS,
        workers: int = 0,
        rate: float = PEAK_RATE,
    ) -> None:
        self.config = Config.of(GEOMETRY)
        self.seed, self.device, self.batch_tokens = seed, torch.device(device), batch_tokens
        self.workers, self.rate = workers, rate
        self.weights = {n: w.to(device).requires_grad_() for n, w in new_weights(self.config, seed).items()}
        trained = [w for n, w in self.weights.items() if not n.endswith("e_score_correction_bias")]
        matrices, vectors = [w for w in trained if w.ndim > 1], [w for w in trained if w.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=self.device.type == "cuda")
        self.steps_done = 0
        torch.manual_seed(seed)

    def model(self) -> Model:
        """The model over the current weights, in the dtype of the forward pass."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return Model(self.config, {n: w.to(dtype) for n, w in self.weights.items()})

    def step(self, ids: Tensor, weights: Tensor, stage: Stage, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """One optimiser step; returns cross-entropy, indexer loss and accuracy, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, indexer, accuracy = losses(self.model(), ids.to(self.device), weights.to(self.device), stage)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + indexer).backward()
        torch.nn.utils.clip_grad_norm_([w for w in self.weights.values() if w.grad is not None], 1.0)
        self.optimizer.step()
        self.steps_done += 1
        return loss.detach(), indexer.detach(), accuracy

    def run(self, stages: tuple[Stage, ...] = STAGES, deadline: float = math.inf) -> Iterator[Progress]:
        """Teach every stage in turn, yielding progress.

        Raises `RuntimeError` if a stage is not mastered; stops at `deadline` (epoch seconds).
        """
        start = time.time()
        for number, stage in enumerate(stages):
            texts = torch.utils.data.DataLoader(
                Texts(stage, f"{self.seed} {number}", self.batch_tokens),
                batch_size=None,
                num_workers=self.workers,
                prefetch_factor=4 if self.workers else None,
            )
            accuracy, last = 0.0, number == len(stages) - 1
            for step, (ids, weights) in enumerate(texts):
                fade = 1 - step / stage.steps if last else 1.0  # the rate falls to nothing over the last stage
                rate = self.rate * min(1.0, self.steps_done / WARMUP, max(fade, 0.02))
                loss, indexer, now = (t.item() for t in self.step(ids, weights, stage, rate))
                accuracy += (now - accuracy) * (0.05 if step > 20 else 1 / (step + 1))
                yield Progress(number, step, loss, indexer, accuracy, time.time() - start)
                if time.time() > deadline or (step + 1 >= stage.steps and accuracy >= stage.gate):
                    break
                if step + 1 >= stage.steps * MOST_STEPS:
                    raise RuntimeError(
                        f"lesson {number + 1} ({stage.kind}) stuck at accuracy {accuracy:.2f}; try another --seed"
                    )

    def save(self, folder: Path) -> None:
        """Write the checkpoint folder in Hugging Face format: config, bf16 weights, tokenizer."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = split_experts({n: w.detach().to("cpu", torch.bfloat16) for n, w in self.weights.items()}, self.config)
        (folder / "config.json").write_text(json.dumps(GEOMETRY, indent=2) + "\n")
        save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
        corpus.save_tokenizer(folder)


def main(out: Path, seed: int = 0, device: str | None = None, batch_tokens: int = BATCH_TOKENS) -> int:
    """Train a checkpoint into folder `out` with a progress line, then print its exact match on held-out prompts.
    Returns the exit status. Raises UserError for a device that is not here.
    """
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn, TimeElapsedColumn

    place = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    trainer = Trainer(seed, place, batch_tokens)
    text = (
        "lesson {task.fields[lesson]}/"
        + str(len(STAGES))
        + "  step {task.fields[step]}  accuracy {task.fields[accuracy]:.2f}  {task.fields[left]}"
    )
    with Bar(TextColumn(text), TimeElapsedColumn()) as bar:
        task = bar.add_task("", lesson=1, step=0, accuracy=0.0, left="")
        for done, now in enumerate(trainer.run(), 1):
            minutes = now.seconds / done * max(0, sum(s.steps for s in STAGES) - done) / 60
            left = f"at least {minutes:.0f} more minutes" if done > 5 else ""
            bar.update(task, lesson=now.stage + 1, step=now.step, accuracy=now.accuracy, left=left)
    trainer.save(out)
    model = Model.load(out, trainer.device)
    for name in corpus.CLASSES:
        print(f"{name}: exact match on 50 held-out prompts {exact_match(model, name, 50, seed=1):.2f}")
    return 0
