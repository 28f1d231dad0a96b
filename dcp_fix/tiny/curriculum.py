"""What is trained, and in which lessons: the geometry of the checkpoint that ships, and the stages of its training.

It does not: train (train.py), or make a text (lessons.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dcp_fix.tiny.corpus import CHECKPOINT

# What Hopper's sparse kernels accept, at the smallest width that learns the task.
GEOMETRY = json.loads((CHECKPOINT / "config.json").read_text())


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
