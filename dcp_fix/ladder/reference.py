"""The run that all others are compared with must say something: logits that are numbers, and that choose a token.

Logits that are NaN, or that are all alike, are those of DCP1 at any size, and nothing follows from it. They come from
weights that overflow or are zero, and what lies in memory that nobody wrote would not show in them.
"""

from torch import Tensor

from dcp_fix.base.errors import UserError

REMEDY = "so nothing follows from comparing them; name another checkpoint"


def check_reference(who: str, logits: Tensor) -> None:
    """Raise UserError unless every row of `logits` [steps, vocabulary] chooses a token. `who`: the run."""
    for step, row in enumerate(logits):
        if not row.isfinite().all():
            raise UserError(f"{who}: the logits of step {step} are no numbers (NaN or infinity), {REMEDY}")
        if (row == row[0]).all():
            raise UserError(f"{who}: the logits of step {step} are all {row[0]:g}, {REMEDY}")
