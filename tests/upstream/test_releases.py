"""The doctor on published wheels: the verdicts that are known, and the committed matrix re-run."""

import pytest

from dcp_fix.doctor import matrix
from dcp_fix.doctor.probes.arguments import checked
from dcp_fix.doctor.probes.configuration import configuration
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


GLM = "zai-org/GLM-5.2 --kv-cache-dtype fp8_ds_mla "
SERVED = {  # what each release says of a command
    GLM + "-tp 4 -dcp 4": {"0.28.0": "returns no LSE", "0.29.0": "only ag_rs", "0.30.0": "only ag_rs"},
    GLM + "-tp 4 -dcp 4 --dcp-comm-backend ag_rs": {"0.28.0": "returns no LSE", "0.29.0": "ok", "0.30.0": "ok"},
    GLM + "-tp 1 -pcp 4 -dcp 4": {"0.29.0": "takes no CUDA graphs", "0.30.0": "PCP with DCP takes only ag_rs"},
    GLM + "-tp 4 -dcp 4 --tp 4": dict.fromkeys(KNOWN, "unrecognized arguments: --tp"),
}


@pytest.mark.parametrize("version", KNOWN)
def test_serve_arguments_are_read_as_the_release_reads_them(version, unpacked):
    for line, says in SERVED.items():
        verdict, evidence = configuration(checked(line), unpacked(version))
        if version in says:
            assert (verdict == "ok") is (says[version] == "ok"), evidence
            assert says[version] in evidence or verdict == "ok", evidence


@pytest.mark.parametrize("version", KNOWN)
def test_the_files_of_a_release_are_recognised(version, unpacked):
    defects = matrix.recorded_defects(unpacked(version))
    assert ("k-rows" in defects, "query-rows" in defects) == (version == "0.29.0", version == "0.28.0")
