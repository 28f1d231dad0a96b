"""Committed records of runs on GPUs: whole, of this checkpoint, and with the token ids that a CPU computes today."""

import copy
from pathlib import Path

import pytest

from dcp_fix import ladder, verify, verify_report
from dcp_fix.engine import Engine
from dcp_fix.evidence import digest, load_record
from dcp_fix.group import SingleGroup
from dcp_fix.model import Model
from dcp_fix.place import checkpoint_terms
from dcp_fix.tiny import corpus

pytestmark = pytest.mark.timeout(120)
RECORDS = sorted((Path(__file__).resolve().parent.parent / "records").glob("*.json"))
CHECKED = ("512", "1536", "1024+1536")  # classes that a CPU answers in seconds
RIGHT = (ladder.REFERENCE, ladder.LAST)  # rungs whose answers must be the CPU's


def runs(value):
    """Every verification row and every answer of a right rung in a record, as (class, prompt number, answer)."""
    if isinstance(value, list):
        for item in value:
            yield from runs(item)
    elif isinstance(value, dict):
        if "prompt_class" in value and "tokens" in value:
            yield value["prompt_class"], value["number"], value
        elif value.get("rung") in RIGHT and value["failure"] is None:
            yield from ((value["prompt_class"], number, answer) for number, answer in enumerate(value["answers"]))
        else:
            for item in value.values():
                yield from runs(item)


def checkpoints(value):
    """Every digest of a checkpoint in a record."""
    if isinstance(value, dict):
        return {(k, v) for k, v in value.items() if k.startswith("checkpoint ")}.union(
            *map(checkpoints, value.values())
        )
    return set().union(*map(checkpoints, value)) if isinstance(value, list) else set()


@pytest.fixture(scope="module")
def tokens():
    """{class: tokens of the first prompt}, by one rank on the CPU."""
    model = Model.load(corpus.CHECKPOINT)
    answers = {}
    for name in CHECKED:
        ids = corpus.prompts(name, 1)[0].ids
        engine = Engine(model, SingleGroup(), dcp_size=1, max_length=len(ids) + ladder.NEW_TOKENS)
        answers[name] = ladder.answer(engine, ids, corpus.CACHED.get(name, 0)).tokens
    return answers


def check(record, tokens):
    """The record's own digests are those of its tokens, and its tokens are those of `tokens`."""
    found = list(runs(record["results"]))
    assert found, "no run in this record"
    for name, number, answer in found:
        assert answer["sha256"] == digest(answer["tokens"]), f"{name} {number}: tokens and digest differ"
        if number == 0 and name in tokens:
            assert answer["tokens"] == tokens[name], f"{name}: other tokens than on a CPU"
    current = set(checkpoint_terms(corpus.CHECKPOINT).items())
    assert checkpoints(record["results"]) <= current, "of another checkpoint: record the run again"


@pytest.mark.parametrize("path", RECORDS, ids=[path.stem for path in RECORDS])
def test_a_record_holds_what_a_cpu_computes(path, tokens):
    record = load_record(path)
    assert record["commit"] and record["hardware"]["gpus"] and record["hardware"]["driver"]
    check(record, tokens)


def test_a_changed_record_is_caught(tokens):
    """Two-sided: each change turns the check red."""
    report = verify.as_threads(verify.Settings(tp=2, dcp=(1, 2), classes=("512",)))
    record = {"results": {"parts": [verify_report.as_json(report)]}}
    check(record, tokens)
    row = lambda changed: changed["results"]["parts"][0]["rows"][1]  # noqa: E731

    def other_token(changed):
        row(changed)["tokens"][0] += 1

    def consistent_other_token(changed):
        other_token(changed)
        row(changed)["sha256"] = digest(row(changed)["tokens"])

    def other_checkpoint(changed):
        changed["results"]["parts"][0]["settings"]["checkpoint config.json"] = "0" * 16

    changes = {
        "tokens and digest differ": other_token,
        "other tokens than on a CPU": consistent_other_token,
        "of another checkpoint": other_checkpoint,
        "no run": lambda changed: changed["results"].clear(),
    }
    for message, change in changes.items():
        changed = copy.deepcopy(record)
        change(changed)
        with pytest.raises(AssertionError, match=message):
            check(changed, tokens)
