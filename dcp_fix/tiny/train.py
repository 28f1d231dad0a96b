"""Train the small checkpoint: `dcp-fix train`, which shows how long it will take.

A retrieval model does not learn from facts alone; what works is a curriculum in which each lesson must be mastered
before the next: words said again and again, then with other words between them, then pairs in changing order, then few
facts in short texts, then more and longer. At the end the texts are longer than `index_topk`, first with full attention
while the indexer learns to predict where attention goes, then with only the keys it selects.

The lessons stand in curriculum.py, what a step minimises in objective.py.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dcp_fix.engine.checkpoint import fuse_experts, split_experts, weight_shapes
from dcp_fix.engine.config import Config
from dcp_fix.engine.engine import resolve_device
from dcp_fix.engine.model import Model, PlainAttention
from dcp_fix.tiny import corpus, lessons
from dcp_fix.tiny.curriculum import GEOMETRY, STAGES, Stage
from dcp_fix.tiny.objective import losses

MOST_STEPS = 20  # a lesson that is not mastered in this many times its steps has failed: try another seed
BATCH_TOKENS = 16384
PEAK_RATE, WARMUP = 7e-4, 200


def batches(stage: Stage, seed: str, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of training texts for one stage: (ids [B, T], weights [B, T]), about `tokens` ids each, endless."""
    streams = [(n, lessons.texts(f"{seed} {n}", stage.kind, n, stage.facts)) for n in stage.lengths]
    for length, stream in itertools.cycle(streams):
        ids, weights = zip(*itertools.islice(stream, max(1, tokens // length)), strict=True)
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
        rate: float = PEAK_RATE,
    ) -> None:
        self.config = Config.of(GEOMETRY)
        self.seed, self.device, self.batch_tokens, self.rate = seed, torch.device(device), batch_tokens, rate
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

    def run(self, stages: tuple[Stage, ...] = STAGES) -> Iterator[Progress]:
        """Teach every stage in turn, yielding progress. Raises `RuntimeError` if a stage is not mastered."""
        start = time.time()
        for number, stage in enumerate(stages):
            accuracy, last = 0.0, number == len(stages) - 1
            texts = batches(stage, f"{self.seed} {number}", self.batch_tokens)
            for step, (ids, weights) in enumerate(texts):
                fade = 1 - step / stage.steps if last else 1.0  # the rate falls to nothing over the last stage
                rate = self.rate * min(1.0, self.steps_done / WARMUP, max(fade, 0.02))
                loss, indexer, now = (t.item() for t in self.step(ids, weights, stage, rate))
                accuracy += (now - accuracy) * (0.05 if step > 20 else 1 / (step + 1))
                yield Progress(number, step, loss, indexer, accuracy, time.time() - start)
                if step + 1 >= stage.steps and accuracy >= stage.gate:
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
    steps = sum(stage.steps for stage in STAGES)  # at least
    with Bar(TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("")
        for done, now in enumerate(trainer.run(), 1):
            minutes = now.seconds / done * max(0, steps - done) / 60
            said = f"lesson {now.stage + 1}/{len(STAGES)}  step {now.step}  accuracy {now.accuracy:.2f}"
            bar.update(task, description=f"{said}  at least {minutes:.0f} more minutes")
    trainer.save(out)
    model = Model.load(out, trainer.device)
    for name in corpus.CLASSES:
        print(f"{name}: exact match on 50 held-out prompts {exact_match(model, name, 50, seed=1):.2f}")
    return 0
