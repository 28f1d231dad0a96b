"""The doctor on published wheels: the verdicts that are known, and the committed matrix re-run."""

import pytest

from dcp_fix.doctor import matrix, serve_args
from dcp_fix.doctor.report import examine

KNOWN = {  # query-rows, combine-routing, k-rows, owner-only-writes
    "0.28.0": ["defect", "defect", "not-applicable", "ok"],
    "0.29.0": ["ok", "ok", "defect", "ok"],
    "0.30.0": ["ok", "ok", "ok", "ok"],
}


@pytest.mark.parametrize("version", KNOWN)
def test_a_wheel_gets_the_known_verdicts_and_those_of_the_matrix(version, release_wheel):
    report = examine(str(release_wheel(version)))
    verdicts = {probe.id: probe.verdict for probe in report.probes}
    assert list(verdicts.values())[:4] == KNOWN[version]
    (recorded,) = [entry for entry in matrix.load()["releases"] if entry["version"] == version]
    assert verdicts == {probe["id"]: probe["verdict"] for probe in recorded["probes"]}
    # What is wrong is said in the same words; NCCL, at the end of one sentence, is this environment's.
    for probe, then in zip(report.probes, recorded["probes"], strict=True):
        assert probe.evidence.split(", and ")[0] == then["evidence"].split(", and ")[0]
    assert report.reach == recorded["reach"]["how"]


@pytest.mark.parametrize(
    ("version", "line", "reached"),
    [
        ("0.28.0", "zai-org/GLM-5.2 -dcp 4", {"query-rows": "not reached", "direct-a2a-layout": "not reached"}),
        ("0.29.0", "zai-org/GLM-5.2 -dcp 4", {"k-rows": "reached", "direct-a2a-layout": "reached"}),
        ("0.29.0", "deepseek-ai/DeepSeek-V3.2 -dcp 4", {"k-rows": "reached", "silent-collective": "reached"}),
        ("0.30.0", "some/model -dcp 4", {"k-rows": "cannot tell", "direct-a2a-layout": "cannot tell"}),
    ],
)
def test_what_a_command_reaches_of_a_release(version, line, reached, unpacked):
    answers = serve_args.reached(serve_args.parsed(line), list(reached), unpacked(version))
    assert {answer.id: answer.reach for answer in answers} == reached


@pytest.mark.parametrize("version", KNOWN)
def test_the_files_of_a_release_are_recognised(version, unpacked):
    defects = matrix.recorded_defects(unpacked(version))
    assert ("k-rows" in defects, "query-rows" in defects) == (version == "0.29.0", version == "0.28.0")
