"""An input on which the ordinary combine chooses another token at another DCP size."""

import torch

from dcp_fix.engine.engine import Generation
from dcp_fix.engine.model import Model

OUTPUT = "lm_head.weight"


def near_tie(model: Model, a: Generation, b: Generation) -> tuple[Model, int]:
    """A model that, on the same prompt, may choose another token where `a` and `b`, equal in tokens, have other bits.

    At the step (returned) where the two runs differ most between their best tokens t and u, row u of the output layer
    is scaled so that the logit of u becomes, on average of both runs, that of t: (t_a + t_b) / (u_a + u_b). Then t is
    ahead in one run and u in the other.
    """
    ranked = a.logits.double().topk(2, -1).indices  # [steps, 2]
    of = [run.logits.double().gather(1, ranked) for run in (a, b)]
    scale = (of[0][:, 0] + of[1][:, 0]) / (of[0][:, 1] + of[1][:, 1])  # [steps]
    lead = (of[0][:, 0] - scale * of[0][:, 1]).abs()  # of t in one run, of u in the other
    lead[(scale < 1) | (scale > 2) | torch.tensor(a.tokens != b.tokens)] = 0
    step = int(lead.argmax())
    assert lead[step] > 0, "no step with other bits and two positive best logits near each other"
    weights = dict(model.weights)
    weights[OUTPUT] = weights[OUTPUT].clone()
    weights[OUTPUT][ranked[step, 1]] *= float(scale[step])
    return Model(model.config, weights), step
