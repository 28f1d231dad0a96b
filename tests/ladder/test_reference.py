"""A reference that chooses no token is said to be one, by every command that compares with it."""

import json

import pytest
import torch

from dcp_fix.base.errors import UserError
from dcp_fix.engine.engine import Generation
from dcp_fix.engine.model import Model
from dcp_fix.ladder import ladder
from dcp_fix.ladder.reference import check_reference
from dcp_fix.ranks.group import GroupError, LocalGroup
from dcp_fix.tiny import corpus
from dcp_fix.verify import forced, verify

SAID = r"the logits of step 0 are no numbers \(NaN or infinity\), so nothing follows"


@pytest.fixture(scope="module")
def senseless():
    """The packaged model with a last norm of numbers that overflow."""
    model = Model.load(corpus.CHECKPOINT)
    weight = model.weights["model.norm.weight"]
    return Model(model.config, model.weights | {"model.norm.weight": torch.full_like(weight, 3e38)})


def test_the_free_pass_refuses_it(senseless, monkeypatch):
    monkeypatch.setattr(Model, "load", lambda *values: senseless)
    monkeypatch.setattr(corpus, "CLASSES", {"512": (60, 1)})
    with pytest.raises(UserError, match=f"DCP1, 512 tokens, prompt 0: {SAID}"):
        verify.as_threads(verify.Settings(tp=2, dcp=(1, 2), classes=("512",), passes=("free",)))


def test_the_forced_pass_refuses_it(senseless):
    case = next(case for case in forced.small_cases() if case.name == "short")
    with pytest.raises(GroupError, match=f"UserError: DCP1, short tokens: {SAID}"):
        LocalGroup.run(1, lambda group: forced.record(case, senseless, group, 1, "ag_rs"))


def test_the_ladder_refuses_it():
    answers = lambda *asked: ([Generation([1], torch.full((1, 3), torch.nan), 0)], None)  # noqa: E731
    with pytest.raises(UserError, match=f"DCP1, 512 tokens, prompt 0: {SAID}"):
        ladder.climb(answers, 1, ("512",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: logits, None),
        (lambda logits: logits[2].fill_(0.0), "of step 2 are all 0"),
        (lambda logits: logits[1].fill_(-7.5), "of step 1 are all -7.5"),
        (lambda logits: logits[1, 3].fill_(torch.nan), "of step 1 are no numbers"),
        (lambda logits: logits[0, 0].fill_(-torch.inf), "of step 0 are no numbers"),
    ],
)
def test_the_step_is_named(change, message):
    logits = torch.eye(4)[:3]
    change(logits)
    if message is None:
        return check_reference("DCP1", logits)
    with pytest.raises(UserError, match=f"DCP1: the logits {message}"):
        check_reference("DCP1", logits)


def test_a_rung_whose_logits_are_no_numbers_has_no_margin_and_can_be_written():
    """Broken rungs read memory that nobody wrote, and NaN is no JSON."""
    (prompt,) = corpus.prompts("512", 1)
    logits = torch.nn.functional.one_hot(torch.tensor(prompt.answer), len(corpus.WORDS)).float()
    whole, odd = Generation(prompt.answer, logits, 0), Generation(prompt.answer, logits.clone(), 0)
    odd.logits[-1, 5] = torch.nan
    assert ladder.judge(prompt, whole, whole).smallest_margin == 1.0
    judged = ladder.judge(prompt, odd, whole)
    assert judged.smallest_margin is None and json.dumps(vars(judged), allow_nan=False)
