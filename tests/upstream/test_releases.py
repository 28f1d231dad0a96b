"""The doctor on published wheels: the verdicts that are known, and the committed matrix re-run."""

import resource

import pytest

from dcp_fix.vllm.doctor import matrix
from dcp_fix.vllm.doctor.report import examine

KNOWN = {  # query-rows, combine-routing, k-rows, owner-only-writes
    "0.28.0": ["defect", "defect", "not-applicable", "ok"],
    "0.29.0": ["ok", "ok", "defect", "ok"],
    "0.30.0": ["ok", "ok", "ok", "ok"],
}


def child_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("version", KNOWN)
def test_a_wheel_gets_the_known_verdicts_and_those_of_the_matrix(version, release_wheel):
    wheel, before = release_wheel(version), child_seconds()
    report = examine(str(wheel))
    assert child_seconds() - before < 5  # of CPU; the clock depends on who shares the machine
    verdicts = {probe.id: probe.verdict for probe in report.probes}
    assert list(verdicts.values())[:4] == KNOWN[version]
    (recorded,) = [entry for entry in matrix.load()["releases"] if entry["version"] == version]
    assert verdicts == {probe["id"]: probe["verdict"] for probe in recorded["probes"]}
    # What is wrong is said in the same words; NCCL, at the end of one sentence, is this environment's.
    for probe, then in zip(report.probes, recorded["probes"], strict=True):
        assert probe.evidence.split(", and ")[0] == then["evidence"].split(", and ")[0]


@pytest.mark.parametrize("version", KNOWN)
def test_the_files_of_a_release_are_recognised(version, unpacked):
    defects = matrix.recorded_defects(unpacked(version))
    assert ("k-rows" in defects, "query-rows" in defects) == (version == "0.29.0", version == "0.28.0")
