"""`doctor --symptom`: every path of questions ends, in probes that exist or in a cause that is named."""

import itertools
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_fix import cli
from dcp_fix.base.errors import UserError
from dcp_fix.doctor import report, runner, symptom
from dcp_fix.doctor.probes import PROBES
from dcp_fix.doctor.symptom import QUESTIONS, UNKNOWN, diagnose, parse
from tests import doctor_targets


def end_of(**answers):
    return diagnose(lambda question: answers.get(question, UNKNOWN))[1]


def every_path():
    """All combinations of answers."""
    for answers in itertools.product(*([*options, UNKNOWN] for _, options in QUESTIONS.values())):
        yield dict(zip(QUESTIONS, answers, strict=True))


def test_every_path_ends_and_every_probe_is_at_some_end():
    ends = [end_of(**answers) for answers in every_path()]
    named = {probe for end in ends for probe in end.probes}
    assert named == {probe.id for probe in PROBES}
    assert all(end.because and (end.probes or end.other) for end in ends)


def test_no_question_is_asked_twice_and_each_can_matter():
    asked = set()
    for answers in every_path():
        said, _ = diagnose(lambda question: answers[question])  # noqa: B023 called at once
        asked |= set(said)
    assert asked == set(QUESTIONS)
    for question in QUESTIONS:
        others = [{**answers, question: other} for answers in every_path() for other in QUESTIONS[question][1]]
        assert len({end_of(**answers) for answers in others}) > 1


@pytest.mark.parametrize(
    ("answers", "probes"),
    [
        ({"looks": "refused"}, {"configuration"}),
        ({"looks": "crash", "length": "long"}, {"split-workspace", "flashinfer-workspace"}),
        ({"looks": "nan", "dcp1": "no", "nccl": "no"}, {"silent-collective"}),
        ({"looks": "fluent", "dcp1": "no", "nccl": "yes", "flag": "yes"}, {"k-rows", "owner-only-writes"}),
        ({"looks": "repeated", "dcp1": "no", "nccl": "yes", "length": "short"}, {"k-rows", "owner-only-writes"}),
        ({"looks": "repeated", "dcp1": "no", "flag": "no", "length": "any"}, {"query-rows", "combine-routing"}),
        ({"looks": "fluent", "dcp1": "no", "load": "yes"}, {"empty-rows"}),
        ({"looks": "fluent", "dcp1": "yes"}, set()),
        ({"looks": "fluent", "dcp1": "no", "cache": "yes"}, set()),
    ],
)
def test_known_symptoms_lead_where_they_should(answers, probes):
    end = end_of(**answers)
    assert probes <= set(end.probes) and bool(probes) is bool(end.probes)


def test_wrong_at_dcp1_too_is_none_of_the_defects():
    for answers in every_path():
        if answers["looks"] in ("nan", "fluent", "repeated") and answers["dcp1"] == "yes":
            assert end_of(**answers) is symptom.NOT_DCP


def status(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dcp-fix", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


def test_answers_may_be_given_and_the_probes_are_run_on_the_target(monkeypatch, capsys, tmp_path):
    findings = [runner.finding(probe, "defect" if probe.id == "k-rows" else "ok", probe.id) for probe in PROBES]
    monkeypatch.setattr(report, "probe_target", lambda target, **k: findings)
    target = doctor_targets.folder(tmp_path / "site")
    answers = json.dumps({"looks": "fluent", "dcp1": "no", "flag": "yes"})
    assert status(monkeypatch, target, "--symptom", "--answers", answers, "--json", tmp_path / "s.json") == 1
    printed = capsys.readouterr().out
    assert "Probes that look at it: k-rows, owner-only-writes." in printed and "silent-collective" not in printed
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["probes"] == ["k-rows", "owner-only-writes"]
    assert [probe["verdict"] for probe in written["report"]["probes"]] == ["defect", "ok"]
    assert status(monkeypatch, target, "--answers", "looks=nan,dcp1=no,nccl=no", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["probes"] == ["silent-collective"]


def test_without_a_target_it_says_what_to_run(monkeypatch, capsys):
    assert status(monkeypatch, "--symptom", "--answers", "looks=nan") == 0
    assert "Run them: dcp-fix doctor" in capsys.readouterr().out
    assert status(monkeypatch, "--symptom", "--answers", "looks=nan,dcp1=yes") == 0
    printed = capsys.readouterr().out
    assert "No probe looks at this." in printed and "chat template" in printed and "Run them" not in printed


def test_at_a_terminal_it_asks_until_it_is_answered(monkeypatch, capsys):
    typed = iter(["what?", "fluent", "no", "", "no", "yes", "yes"])
    monkeypatch.setattr("typer.prompt", lambda *a, default, **k: next(typed) or default)
    assert status(monkeypatch, "--symptom") == 0
    printed = capsys.readouterr()
    assert "please answer with one of repeated/nan/fluent/crash/refused/unknown" in printed.err
    assert "k-rows, owner-only-writes" in printed.out and next(typed, "nothing is left") == "nothing is left"


@pytest.mark.parametrize(
    "text",
    ["looks", "looks=", "looks=odd", "other=yes", "{", "[1]", '{"looks": 3}', '{"looks": ["nan"]}', "{" * 99_999],
)
def test_answers_that_are_none_are_one_line(text):
    with pytest.raises(UserError, match="--answers") as refused:
        parse(text)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 300


@given(st.text(max_size=30))
def test_any_text_is_answers_or_one_line(text):
    try:
        end_of(**parse(text))
    except UserError as refused:
        assert str(refused).startswith("--answers")
