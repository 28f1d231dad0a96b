"""Recorded runs: each committed record is whole, names nobody's machine, and holds tokens that a CPU computes today."""

import math
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from dcp_fix.base import equality
from dcp_fix.base.errors import UserError
from dcp_fix.engine.engine import Generation
from dcp_fix.ladder import ladder
from dcp_fix.ladder import report as ladder_report
from dcp_fix.learn import recorded_runs
from dcp_fix.records import records
from dcp_fix.records.fingerprints import checkpoint_terms
from dcp_fix.tiny import corpus
from tests.norm_rope_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
RECORDS = recorded_runs.load_all(ROOT / "notebooks/records")
MISSED = 0.1  # share of a class's prompts that the checkpoint may answer wrongly, at every DCP size alike
FEW = 5  # prompts of a class, below which all are to be right
COMPUTED = 2  # prompts of the class 512 that are answered here
PAGES = [ROOT / "README.md", *sorted((ROOT / "dcp_fix").rglob("*.md"))]
TOLD = " ".join(" ".join(page.read_text() for page in PAGES).split())  # a figure stands on one of these pages


# --- the committed records --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def computed():
    """Tokens of DCP1 and of the last rung, here and now: {rung: a list per prompt}."""
    setup = ladder.load(corpus.CHECKPOINT, tp=4, dcp=4, stale="previous", device="cpu")
    prompts = corpus.prompts("512", COMPUTED)
    rungs = (ladder.REFERENCE, ladder.LAST)
    return {rung: [a.tokens for a in ladder.generate(setup, rung, "512", prompts)[0]] for rung in rungs}


def check(record, computed):
    """The digests are those of the tokens; the tokens are those of this CPU, and of MISSED at most not the answer."""
    answers, found = recorded_runs.healthy_answers(record), recorded_runs.runs(record)
    assert answers or any({"tests", "graph", "kernels", "pack", "planted"} & run.keys() for run in found), "no answer"
    for name in {answer.prompt_class for answer in answers}:
        of_class = [answer for answer in answers if answer.prompt_class == name]
        prompts = corpus.prompts(name, 1 + max(answer.number for answer in of_class))
        for answer in of_class:
            assert answer.sha256 == equality.digest(answer.tokens), f"{name} {answer.number}: not its tokens' digest"
            if name == "512" and answer.number < COMPUTED:
                assert all(tokens[answer.number] == answer.tokens for tokens in computed.values())
        missed = {a.number for a in of_class if a.tokens != prompts[a.number].answer}
        few = len(prompts) < FEW
        assert len(missed) <= (0 if few else math.ceil(MISSED * len(prompts))), f"{name} {sorted(missed)}: not right"
    for run in recorded_runs.verifications(record):
        told = {name: value for name, value in run["settings"].items() if name.startswith("checkpoint ")}
        assert run["ok"] and told == checkpoint_terms(corpus.CHECKPOINT), "of another checkpoint: record it again"
    assert all(run["ok"] for run in recorded_runs.all_planted(record))
    assert not any("failed" in run["tests"].values() for run in recorded_runs.outcomes(record)), "test_fails"


@pytest.mark.parametrize("name", RECORDS)
def test_a_committed_record_holds_what_a_cpu_computes(name, computed):
    check(RECORDS[name], computed)
    commit, dirty = RECORDS[name]["commit"], RECORDS[name]["dirty"]
    assert len(commit) == 40 and dirty is False, "a record of no commit proves nothing about this code"
    paths = [word.split("=")[-1] for word in shlex.split(RECORDS[name]["command"]) if "/" in word]
    assert all((ROOT / path).exists() for path in paths), "name the file in a command without its folder"


def test_twenty_prompts_a_class_climb_the_ladder():
    """README: what each rung makes of 20 prompts, and which it leaves to luck."""
    rows = {(row["rung"], row["prompt_class"]): row for row in RECORDS["reproduce20_previous"]["results"]["rows"]}
    equal = {key: sum(a["first_difference"] is None for a in row["answers"]) for key, row in rows.items()}
    right = {name: sum(a["right"] for a in rows["DCP1", name]["answers"]) for name in corpus.CLASSES}
    assert right == {"512": 20, "1536": 20, "1024+1536": 19, "8192": 18}
    of_rung = {rung: [equal[rung, name] for name in corpus.CLASSES if (rung, name) in equal] for rung in ladder.RUNGS}
    assert of_rung["unpatched"] == of_rung["+query norm"] == [0, 0, 0]
    assert of_rung["+combine routing"] == [1, 20, 20]
    assert of_rung["+K rows"] == [20, 20, 20, 0] and rows["+K rows", "8192"]["failure"].startswith("workspace")
    assert of_rung["+workspace"] == [20, 20, 20, 20]


def test_a_dense_prompt_that_survives_unwritten_keys_is_lucky():
    """README: 1, 2 and 3 of 20 over three kinds of memory, none over all three, and by how little."""
    survivors, leads, healthy = {}, [], []
    for stale in ("previous", "zeros", "noise"):
        rows = {(r["rung"], r["prompt_class"]): r for r in RECORDS[f"reproduce20_{stale}"]["results"]["rows"]}
        answers = rows["+combine routing", "512"]["answers"]
        alive = {number for number, answer in enumerate(answers) if answer["first_difference"] is None}
        survivors[stale], leads = alive, leads + [answers[number]["smallest_margin"] for number in alive]
        healthy += [answer["smallest_margin"] for answer in rows["DCP1", "512"]["answers"]]
        assert rows["+K rows", "512"]["equal"] == rows["+workspace", "512"]["equal"] == len(answers) == 20
    assert {stale: len(alive) for stale, alive in survivors.items()} == {"previous": 1, "zeros": 2, "noise": 3}
    assert not set.intersection(*survivors.values())
    assert 0.06 <= min(leads) < 0.07 and min(healthy) >= 6.9


PACKED = "h200x2_vllm0300_packed"
REAL = [name for name in RECORDS if name.startswith("h200x2_vllm") and name != PACKED]


def real_rows(name):
    """{(rung, class, all at once): row} of a ladder in real vLLM."""
    (run,) = recorded_runs.real_ladders(RECORDS[name])
    return {(row["rung"], row["prompt_class"], row["batch"]): row for row in run["rows"]}


@pytest.mark.parametrize("name", REAL)
def test_real_vllm_at_dcp1_gives_the_tokens_of_our_engine_on_a_cpu(name):
    """README: 60 of 60 prompts, one by one and all at once."""
    ours = [answer for answer in recorded_runs.healthy_answers(RECORDS["reproduce20_previous"])]
    tokens = {(answer.prompt_class, answer.number): answer.tokens for answer in ours}
    theirs = [row for (rung, _, _), row in real_rows(name).items() if rung == "DCP1"]
    assert len(theirs) == 6
    for row in theirs:
        assert [a["tokens"] for a in row["answers"]] == [tokens[row["prompt_class"], n] for n in range(20)]


@pytest.mark.parametrize("name", ["h200x2_vllm0290", "h200x2_vllm0290_graphs"])
def test_029_is_wrong_as_installed_on_the_dense_path_alone_and_right_with_the_plugin(name):
    """README and page 08: 0.29.0 at DCP2, eager and compiled with CUDA graphs."""
    rows = real_rows(name)
    cured = {"with the plugin", "forced MQA"} & {rung for rung, _, _ in rows}
    assert "with the plugin" in cured
    for (rung, prompt_class, batch), row in rows.items():
        wrong = rung == "as installed" and prompt_class == "512"
        assert (row["equal"] < 20) is wrong, (rung, prompt_class, batch)
        assert not row["failure"] and (rung not in cured or row["nan"] == 0)
    assert any(answer["nan"] for answer in rows["as installed", "512", True]["answers"])


@pytest.mark.parametrize("name", ["h200x2_vllm0300", "h200x2_vllm0300_graphs"])
def test_030_is_healthy_as_installed(name):
    rows = real_rows(name)
    assert {row["equal"] for row in rows.values()} == {20} and {rung for rung, _, _ in rows} == {"DCP1", "as installed"}


@pytest.mark.parametrize("name", ["h200x2_vllm0290_put_back", "h200x2_vllm0300_put_back"])
def test_defects_put_back_into_real_vllm_break_it_as_they_did(name):
    """Query norm and routing break every answer; K rows those of the dense path alone."""
    for (rung, prompt_class, _), row in real_rows(name).items():
        if rung in ("unpatched", "+query norm"):
            assert row["equal"] == 0
        elif rung == "+combine routing":
            assert (row["equal"] < 20) is (prompt_class == "512")
    unpatched = real_rows(name)["unpatched", "1536", False]
    assert all(answer["nan"] for answer in unpatched["answers"])  # query rows that hold anything
    fluent = real_rows(name)["+query norm", "1536", False]
    assert not any(answer["nan"] for answer in fluent["answers"])


def test_packed_ids_give_real_vllm_the_answers_of_dcp1():
    """README: 40 of 40, with DCP_FIX_PACK=1 in both rungs' environment; in the second it had something to pack."""
    rows = [row for (rung, _, _), row in real_rows(PACKED).items() if rung == "with the plugin"]
    assert sum(row["equal"] for row in rows) == sum(len(row["answers"]) for row in rows) == 40
    (run,) = recorded_runs.real_ladders(RECORDS[PACKED])
    said = run["boots"]["with the plugin"]["log"]["plugin"]
    assert any(line.startswith("pack_and_cut applied") for line in said)
    assert "40 of 40" in TOLD


def test_the_readme_says_what_packing_is_worth():
    (run,) = recorded_runs.packings(RECORDS["h200x2_pack0300"])
    ms = {(row["work"], row["packed"]): statistics.median(row["ms"]) for row in run["pack"]}
    assert f"{ms['prefill', False]:.0f} to {ms['prefill', True]:.0f} ms" in TOLD
    assert f"{ms['decode', False]:.2f} to {ms['decode', True]:.2f} ms" in TOLD
    assert any(
        line.startswith("pack_and_cut applied") for row in run["pack"] if row["packed"] for line in row["plugin"]
    )
    assert not any("pack" in line for row in run["pack"] if not row["packed"] for line in row["plugin"])


def test_the_readme_counts_the_answers_of_real_vllm():
    for name, rung, said in (
        ("h200x2_vllm0290", "as installed", "as installed | **{}**"),
        ("h200x2_vllm0290_graphs", "as installed", "CUDA graphs **{}**"),
        ("h200x2_vllm0290", "forced MQA", "(a flag) | {}"),
        ("h200x2_vllm0290_graphs", "with the plugin", "with the plugin, eager and with CUDA graphs | {}"),
        ("h200x2_vllm0300_graphs", "as installed", "as installed, eager and with CUDA graphs | {}"),
        ("h200x2_vllm0300_put_back", "+combine routing", "K rows alone | 0; 0; {}"),
    ):
        equal = sum(row["equal"] for (of, _, _), row in real_rows(name).items() if of == rung)
        assert said.format(equal) in TOLD, (name, rung, equal)
    assert real_rows("h200x2_vllm0300_put_back")["+combine routing", "512", False]["equal"] == 0


def test_the_list_of_records_shows_every_record():
    sections = recorded_runs.markdown(ROOT / "notebooks/records")
    assert f"-->\n{sections}<!-- end of records -->" in (ROOT / "notebooks/records/README.md").read_text()


def test_every_case_of_the_fused_kernel_was_compiled_and_run():
    outcomes = RECORDS["h200_kernels"]["results"]["tests"]
    node = "tests/gpu/test_gpu_kernels.py::test_every_case_compiled[{}]".format
    assert {name: outcomes.get(node(name)) for name in CASES} == dict.fromkeys(CASES, "passed") and len(CASES) >= 67


def test_every_page_ran_beside_a_gpu_with_the_outputs_of_a_cpu():
    outcomes = RECORDS["h200_notebooks"]["results"]["tests"]
    pages = sorted((ROOT / "notebooks").glob("0[0-7]_*.ipynb"))
    for page in pages:
        cells = [cell for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == "code"]
        names = [f"notebooks/{page.name}::Cell {number}" for number in range(len(cells))]
        assert [outcomes.get(name) for name in names] == ["passed"] * len(cells)
    assert len(pages) == 8


def logits_digests(run):
    """{(class, DCP size): digest per step} of a verification."""
    return {(row["prompt_class"], row["dcp"]): row["logits"] for row in run["rows"]}


def test_exact_mode_on_gpus_has_one_digest_per_step():
    """README: threads on one H200 and two over NCCL, every class and size, plain and as CUDA graphs."""
    host = [run for run in recorded_runs.verifications(RECORDS["h200x2_host"]) if run["settings"]["combine"] == "exact"]
    alone = [RECORDS[name]["results"] for name in ("h200_exact", "h200_exact_graphs")]
    for run in (*alone, *host):
        digests, sizes = logits_digests(run), run["settings"]["dcp"]
        assert len(digests) == len(corpus.CLASSES) * len(sizes)
        assert all(digests[name, size] == digests[name, sizes[0]] for name in corpus.CLASSES for size in sizes)
    assert logits_digests(alone[0]) == logits_digests(alone[1])
    other_transport = logits_digests(RECORDS["h200_exact_ag_rs"]["results"])
    assert len(other_transport) == 8 and other_transport.items() <= logits_digests(alone[0]).items()
    assert {(run["transport"], run["settings"]["tp"]) for run in host} == {("threads", 4), ("nccl", 2), ("gloo", 4)}


def test_transports_graphs_and_routes_have_the_same_bits():
    """README: the same sums in the same order; threads and processes that share GPUs, plain and CUDA graphs, a2a."""
    runs = {}
    for run in recorded_runs.verifications(RECORDS["h200x2_host"]):
        settings = run["settings"]
        group = settings["tp"], "exact" if settings["combine"] == "exact" else "ordinary"
        runs.setdefault(group, []).append(logits_digests(run))
    assert {group: len(same) for group, same in runs.items()} == {
        (4, "ordinary"): 6, (4, "exact"): 3, (2, "ordinary"): 4, (2, "exact"): 2,
    }  # fmt: skip
    assert all(digests == same[0] for same in runs.values() for digests in same)


def test_the_ordinary_combine_differs_where_it_combines():
    """README: a dense prefill combines nothing, so its first row of logits has the same bits; no later one has."""
    digests = logits_digests(RECORDS["h200_verify_graphs"]["results"])
    for size in (2, 4):
        assert digests["512", size][0] == digests["512", 1][0]
        assert not set(digests["512", size][1:]) & set(digests["512", 1][1:])
        assert not set(digests["8192", size]) & set(digests["8192", 1])


def test_the_readme_says_what_exact_mode_costs():
    rows = RECORDS["h200_bench"]["results"]["rows"]
    key = lambda row: (row["dcp"], row["context"], row["tokens"])  # noqa: E731
    ordinary = {key(row): row for row in rows if row["method"] == "a2a"}
    for dcp, classes in ((4, 4), (4, 8), (1, 8)):
        of = [row for row in rows if (row["dcp"], row["classes"]) == (dcp, classes)]
        times = [row["attend_ms"] / ordinary[key(row)]["attend_ms"] for row in of]
        assert f"| D={dcp}, C={classes} | {min(times):.2f} to {max(times):.2f} |" in TOLD
        assert all(row["bytes"] == ordinary[key(row)]["bytes"] for row in of)
    for method in ("a2a", "ag_rs"):
        ordinary = {key(row): row for row in rows if row["method"] == method}
        steps = [row["step_ms"] / ordinary[key(row)]["step_ms"] for row in rows if row["dcp"] == 4 and row["classes"]]
        assert f"| against `{method}` | {min(steps):.2f} to {max(steps):.2f} |" in TOLD


ONE_OF_EACH = """
import pytest
def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise OSError
def test_breaks_afterwards(broken): pass
"""


@pytest.mark.parametrize("options", [[], ["-x"]])
def test_pytest_records_what_became_of_each_test(options, tmp_path):
    """A run that is cut short leaves no record."""
    (tmp_path / "test_it.py").write_text(ONE_OF_EACH)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "--record", "it.json", *options, "test_it.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    if options:
        assert not list(tmp_path.glob("*.json"))
        return
    record = records.load_record(tmp_path / "it.json")
    assert record["command"].startswith("python -m pytest -q -p conftest --record it.json")
    assert record["results"]["tests"] == {
        "test_it.py::test_breaks_afterwards": "failed", "test_it.py::test_fails": "failed",
        "test_it.py::test_passes": "passed", "test_it.py::test_skipped": "skipped",
    }  # fmt: skip
    with pytest.raises(AssertionError, match="test_fails"):
        check(record, {})


# --- records made without running anything ---------------------------------------------------------------------------


def ladder_results():
    """What `reproduce` writes if every rung answers one prompt rightly."""
    (prompt,) = corpus.prompts("512", 1)
    logits = torch.nn.functional.one_hot(torch.tensor(prompt.answer), len(corpus.WORDS)).float()
    answered = [Generation(prompt.answer, logits, 0)]
    rows = [ladder.row(rung, "512", [prompt], answered, answered) for rung in (ladder.REFERENCE, *ladder.RUNGS)]
    return ladder_report.as_json(rows, 1, ladder.Setup(None), ladder.repaired(rows, 1))


def verify_results(device):
    """What `verify` and `bench` write, as far as it is read here."""
    return {"transport": "threads", "settings": {"tp": 2, "device": device}, "verdict": "fine", "rows": []}


CPU = {"cpu": "x", "gpus": []}
TWO = {"cpu": "x", "gpus": ["NVIDIA H200"] * 2}


@pytest.mark.parametrize(
    "results, machine, said",
    [
        (verify_results("cuda"), TWO, "2 x NVIDIA H200"),
        (verify_results("cpu"), TWO, "CPU, x"),
        (verify_results("cpu"), CPU, "CPU, x"),
        ({"graph": False, "rows": []}, TWO, "CPU, x"),
        ({"graph": True, "rows": []}, TWO, "2 x NVIDIA H200"),
        ({"parts": {"threads": {"verify": [verify_results("cuda")]}}}, TWO, "2 x NVIDIA H200"),
        ({"parts": {"processes": {"verify": [verify_results("cpu")]}}}, TWO, "CPU, x"),
    ],
)
def test_hardware_counts_gpus_only_where_they_took_part(results, machine, said):
    assert recorded_runs.hardware({"results": results, "hardware": machine}) == said


def test_a_record_with_one_other_token_is_caught(computed):
    made = {"results": ladder_results()}
    check(made, computed)
    recorded_runs.healthy_answers(made)[-1].tokens[0] += 1  # the list in the record itself
    with pytest.raises(AssertionError, match="not its tokens' digest"):
        check(made, computed)
    with pytest.raises(AssertionError, match="no answer"):
        check({"results": {"parts": {}}}, computed)


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b", "a"):
        records.record(tmp_path / f"{name}.json", "dcp-fix reproduce", ladder_results())
    assert list(recorded_runs.load_all(tmp_path)) == ["a", "b"] and recorded_runs.load_all(tmp_path / "none") == {}
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(UserError, match="not a whole JSON file"):
        recorded_runs.load_all(tmp_path)
