"""What `dcp-fix verify` is asked to do, and what it refuses at the door."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dcp_fix import combine, exact, planted
from dcp_fix.base.errors import UserError
from dcp_fix.engine.checkpoint import check_folder
from dcp_fix.engine.engine import default_dtype, resolve_device
from dcp_fix.engine.exact_attention import METHODS as EXACT
from dcp_fix.engine.shard import check_dcp, check_tp
from dcp_fix.engine.sharded import Ops
from dcp_fix.ladder import ladder
from dcp_fix.records.fingerprints import checkpoint_terms, code_terms
from dcp_fix.tiny import corpus

CLASSES = tuple(corpus.CLASSES)
COMBINES = (*combine.METHODS, *EXACT)
PASSES = ("free", "forced")


@dataclass(frozen=True)
class Settings:
    """What every rank must be started with."""

    tp: int = 4
    dcp: tuple[int, ...] = (1, 2, 4)
    classes: tuple[str, ...] = CLASSES
    prompts: int = 1
    combine: str = "ag_rs"
    device: str = "cpu"
    cuda_graphs: bool = False
    share_gpus: bool = False
    checkpoint: Path = corpus.CHECKPOINT
    logits: bool = False
    passes: tuple[str, ...] = PASSES
    plant: str | None = None

    def check(self) -> None:
        """Raise UserError for what cannot run, before anything is started."""
        check_tp(check_folder(Path(self.checkpoint)), self.tp)
        for size in self.dcp:
            check_dcp(self.tp, size)
        if len(set(self.dcp)) < 2 or len(set(self.dcp)) < len(self.dcp):
            raise UserError(f"DCP sizes {listed(self.dcp)}: name at least two different ones to compare")
        ladder.check_names(self.classes)
        if self.combine not in COMBINES:
            raise UserError(f"combine method {self.combine!r} is not one of {listed(COMBINES)}")
        if not self.passes or not set(self.passes) <= set(PASSES):
            raise UserError(f"passes {listed(self.passes)}: choose from {listed(PASSES)}")
        if self.plant is not None:
            self.check_plant()
        self.check_passes()
        if self.combine in EXACT:
            for size in self.dcp:
                exact.check_classes(exact.CLASSES, size)
        device = resolve_device(self.device)
        if self.cuda_graphs and (device.type != "cuda" or self.share_gpus):
            raise UserError("--cuda-graphs needs --device cuda, and ranks that do not share a GPU through gloo")

    def check_passes(self) -> None:
        """Raise UserError for settings of the free pass without it: they would do nothing."""
        asked = {"--logits": self.logits, "--cuda-graphs": self.cuda_graphs, "--prompts": self.prompts > 1}
        if "free" not in self.passes and any(asked.values()):
            given = ", ".join(name for name, value in asked.items() if value)
            raise UserError(f"{given}: no meaning with --passes forced, which answers nothing; add free")

    def check_plant(self) -> None:
        """Raise UserError for a defect that nobody knows or that cannot be planted here."""
        if self.plant not in planted.PLANTS:
            raise UserError(f"no planted defect {self.plant!r}; --plant list names them")
        if self.combine in EXACT or self.cuda_graphs:
            raise UserError("--plant goes with ag_rs or a2a, and without --cuda-graphs")

    @property
    def ops(self) -> Ops:
        """The engine's steps at every DCP size but the reference."""
        return planted_ops(self.plant)

    def terms(self) -> dict:
        """What the ranks compare before they start: settings, code, and the checkpoint's content wherever it lies."""
        told = {name: value for name, value in asdict(self).items() if name != "checkpoint"}
        return told | code_terms() | checkpoint_terms(self.checkpoint)

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return default_dtype(torch.device(self.device))


def planted_ops(plant: str | None) -> Ops:
    """The corrected steps, one of them replaced by the planted defect of that name."""
    if plant is None:
        return Ops()
    return replace(Ops(), **{planted.PLANTS[plant].step: planted.PLANTS[plant].function})


def listed(values) -> str:
    """Values for a message."""
    return ", ".join(map(str, values))
